"""An executor's reports about the storage of its host: saves by its writer, free space, when a disk will be full."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.arena.directory import Arena
from megatrain.arena.plans import WriterStatus
from megatrain.contracts.records.host_records import HostSaves
from megatrain.run_files.run_directory import RunDirectory
from megatrain_launcher.executor.storage_watch import SpaceSample, StorageWatch, full_in_s, saves_of
from megatrain_launcher.launch.plan import LaunchPlan, make_plan
from tests.helpers.arena_snapshots import host_plan, make_arena
from tests.helpers.launch_cases import small_flags
from tests.helpers.waiting import DEADLINE_S, wait_until

STATUS = WriterStatus(
    pid=17, branch="main", round=2, num_persisted=3, num_failures=0, last_persisted_step=120, last_error="",
    last_write_s=0.5, last_write_bytes=4096, persisted_unix_s=1000.0,
)  # fmt: skip
FAILING = replace(STATUS, num_failures=2, num_failed=2, failing_unix_s=1010.0, last_error="step 140: disk full")


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    arenas = tmp_path / "arenas"
    arenas.mkdir()
    return make_plan(small_flags(tmp_path, overrides=(f"--checkpoint.arena_directory={arenas}",)), {})


def arena_of(plan: LaunchPlan, branch: str, host: str) -> Arena:
    reported = replace(host_plan(str(plan.files.run / "checkpoints")), job="small")
    name = f"megatrain-arena1.small.{branch}.0a1b2c3d.{host}"
    return make_arena(Path(plan.config.checkpoint.arena_directory) / name, reported)


@contextmanager
def watching(plan: LaunchPlan, changed: threading.Event) -> Iterator[StorageWatch]:
    run = RunDirectory(plan.files.run)
    run.create()
    watch = StorageWatch(plan.config, run, "host-1", changed.set)
    try:
        yield watch
    finally:
        watch.close()


def test_changed_writer_status_is_reported(plan: LaunchPlan) -> None:
    changed = threading.Event()
    STATUS.write(arena_of(plan, "main", "host-1").writer_status)
    # another host's on this machine, and the branch that the job has left
    FAILING.write(arena_of(plan, "main", "host-2").writer_status)
    replace(FAILING, round=1).write(arena_of(plan, "before", "host-1").writer_status)
    with watching(plan, changed) as watch:
        assert changed.wait(DEADLINE_S)
        assert watch.view.saves == HostSaves(saved_step=120, saved_unix_s=1000.0, num_bytes=4096)
        changed.clear()
        FAILING.write(arena_of(plan, "main", "host-1").writer_status)
        assert changed.wait(DEADLINE_S)
        reported = watch.view.saves
        assert reported is not None
        assert (reported.num_failed, reported.failing_unix_s, reported.error) == (2, 1010.0, "step 140: disk full")


def test_the_space_of_the_run_is_reported_once_for_each_disk(plan: LaunchPlan) -> None:
    with watching(plan, threading.Event()) as watch:
        wait_until(lambda: bool(watch.view.disks), "a poll of the disk")
        (disk,) = watch.view.disks
    assert (disk.path, disk.full_in_s) == (str(plan.files.run), None)
    assert 0 <= disk.free_bytes <= disk.total_bytes


def test_a_job_without_an_arena_reports_no_saves(plan: LaunchPlan) -> None:
    with watching(plan, threading.Event()) as watch:
        wait_until(lambda: bool(watch.view.disks), "a poll")
        assert watch.view.saves is None


def test_unprintable_writer_error_is_made_text() -> None:
    found = saves_of(replace(FAILING, last_error="a\udc80b" + "x" * 999))
    assert found.error.startswith("a\\udc80b")
    assert len(found.error) == 400


GB = 10**9


def samples(free: list[int]) -> list[SpaceSample]:
    return [SpaceSample(10.0 * number, one) for number, one in enumerate(free)]


def test_disk_is_full_at_the_time_of_its_rate() -> None:
    for free, full_s in [
        ([200 * GB - GB * number for number in range(121)], 800),  # 100 MB a second for 20 minutes; 80 GB are free
        ([400 * GB - 10 * GB * (number // 30) for number in range(361)], 280 / 10 * 300),  # bursts that stay
    ]:
        assert full_in_s(samples(free)) == pytest.approx(full_s, rel=0.1), len(free)


def test_trend_without_information_is_unknown() -> None:
    for free in [
        [],
        [5 * GB],
        [100 * GB - (number % 30) * GB for number in range(360)],  # bursts that are removed again
        [100 * GB - GB * number for number in range(30)],  # five minutes: possibly a single checkpoint
        [100 * GB] * 50 + [60 * GB] * 310,  # one burst, and no change since
        [100 * GB + GB * number for number in range(360)],  # files are removed
    ]:
        assert full_in_s(samples(free)) is None, len(free)
