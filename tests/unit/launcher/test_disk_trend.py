"""The time at which a disk will be full: a pure function of the changes of its free space."""

from __future__ import annotations

import pytest

from megatrain_launcher.executor.storage_watch import SpaceSample, full_in_s

GB = 10**9


def samples(free: list[int]) -> list[SpaceSample]:
    return [SpaceSample(10.0 * number, one) for number, one in enumerate(free)]


def test_evenly_filling_disk_is_full_at_the_time_of_its_rate() -> None:
    # 100 MB a second, for 20 minutes; 80 GB are free
    found = full_in_s(samples([200 * GB - GB * number for number in range(121)]))
    assert found == pytest.approx(800, rel=0.03)


def test_bursts_that_are_removed_again_fill_no_disk() -> None:
    saw = [100 * GB - (number % 30) * GB for number in range(360)]
    assert full_in_s(samples(saw)) is None


def test_trend_without_information_is_unknown() -> None:
    for free in [
        [],
        [5 * GB],
        [100 * GB - GB * number for number in range(30)],  # five minutes: possibly a single checkpoint
        [100 * GB] * 50 + [60 * GB] * 310,  # one burst, and no change since
        [100 * GB + GB * number for number in range(360)],  # files are removed
    ]:
        assert full_in_s(samples(free)) is None, len(free)


def test_bursts_that_stay_fill_the_disk() -> None:
    steps = [400 * GB - 10 * GB * (number // 30) for number in range(361)]
    found = full_in_s(samples(steps))
    assert found == pytest.approx(280 / 10 * 300, rel=0.1)
