"""The times at which checkpoints are due, by a clock that the test sets, and the log lines about them at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.save_policy import SaveInterval, free_bytes, policy_notes
from megatrain.config.checkpoint import CheckpointConfig

GB = 10**9


class SaveClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def interval(clock: SaveClock, **settings: Any) -> SaveInterval:
    return SaveInterval(CheckpointConfig(**settings), clock)


def test_next_checkpoint_is_due_one_interval_after_the_last() -> None:
    clock = SaveClock()
    found = interval(clock)
    clock.now += 599.0
    assert not found.is_over(is_storing=False)
    clock.now += 1.0
    assert found.is_over(is_storing=False)
    found.saved(0.5)
    assert not found.is_over(is_storing=False)
    clock.now += 600.0
    assert found.is_over(is_storing=False)


def test_no_more_than_a_share_of_the_time_goes_into_checkpoints() -> None:
    clock = SaveClock()
    found = interval(clock)
    found.saved(30.0)
    assert found.length_s == pytest.approx(1500.0)  # 30 s are 2 % of it
    clock.now += 1499.0
    assert not found.is_over(is_storing=False)
    clock.now += 2.0
    assert found.is_over(is_storing=False)
    found.saved(1.0)  # it is quick again
    assert found.length_s == 600.0


def test_no_checkpoint_is_due_while_the_last_is_written() -> None:
    clock = SaveClock()
    found = interval(clock)
    clock.now += 5000.0
    assert not found.is_over(is_storing=True)
    assert found.is_over(is_storing=False)


def test_no_checkpoint_is_due_by_time_without_a_time_interval() -> None:
    for settings in ({"interval": 100}, {"interval_s": 0.0}, {"interval": 7, "interval_s": 0.0}):
        clock = SaveClock()
        found = interval(clock, **settings)
        clock.now += 1e6
        assert not found.is_over(is_storing=False), settings


def test_number_of_kept_checkpoints_follows_from_the_interval() -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 3),
        ({"interval": 100}, 0),
        ({"interval": 100, "keep_last": 2}, 2),
        ({"keep_last": 0}, 0),
        ({"keep_last": 5}, 5),
    ]
    for settings, num_kept in cases:
        assert CheckpointConfig(**settings).num_kept == num_kept, settings


BY_TIME = (
    "a checkpoint is taken every 10 min of training (checkpoint.interval_s), less often if they would take more "
    "than 2% of it; the last step is saved"
)
NEVER = (
    "WARNING: no checkpoint is taken before the end; the last step is saved: checkpoint.interval=0 and "
    "checkpoint.interval_s=0; a failure loses all training progress that is not still in memory"
)
TWO_KINDS = (
    "the newest 1 and those of every 100th step are kept (checkpoint.keep_last), 7 GB each: up to 14 GB for the newest "
    "in /runs, where 10 GB are free"
)
SMALL_DISK = (
    "WARNING: /runs may become too small for its checkpoints: they need 14 GB, and 10 GB are free; keep fewer "
    "(checkpoint.keep_last), or name a larger directory (checkpoint.directory)"
)
THREE = "the newest 3 are kept (checkpoint.keep_last), 7 GB each: up to 28 GB in /runs, where 100 GB are free"
ALL = "all of them are kept (checkpoint.keep_last), 7 GB each in /runs"
EVERY_10 = "a checkpoint is taken every 10 steps (checkpoint.interval)"


def test_log_lines_about_checkpoints_at_the_start() -> None:
    cases: list[tuple[dict[str, Any], int | None, list[str]]] = [
        ({}, 100 * GB, [BY_TIME, THREE]),
        ({"interval": 10, "save_at_end": False}, None, [EVERY_10, ALL]),
        (
            {"interval": 10, "keep_last": 1, "keep_every": 100},
            10 * GB,
            [f"{EVERY_10}; the last step is saved", TWO_KINDS, SMALL_DISK],
        ),
        ({"interval_s": 0.0}, 100 * GB, [NEVER]),
    ]
    for settings, free, notes in cases:
        assert policy_notes(CheckpointConfig(**settings), "/runs", 7 * GB, free) == notes


def test_free_space_is_that_of_the_disk_and_of_no_url(tmp_path: Path) -> None:
    found = free_bytes(str(tmp_path / "not" / "there" / "yet"))
    assert found is not None
    assert found > 0
    assert free_bytes("s3://bucket/run") is None
