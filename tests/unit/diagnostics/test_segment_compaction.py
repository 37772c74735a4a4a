"""Merging segments: fewer files with the same rows, also for concurrent readers."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatrain_diagnostics.events.tables import StepTotals, num_rows
from megatrain_diagnostics.store.compaction import (
    GRACE_S,
    HOUR_IS_OVER_NS,
    MAX_BYTES,
    MAX_SMALL_FILES,
    SmallFile,
    compact,
    plan_merges,
)
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.store.segments import SegmentName, not_superseded, parse_name
from tests.helpers.stored_events import START_NS, committed, segment_paths, step_totals

HOUR_NS = 3600 * 10**9
LATER_NS = START_NS + HOUR_NS + HOUR_IS_OVER_NS


def filled(directory: Path, num_files: int) -> StepTotals:
    """Write the segments of an hour, one step each, with some rows twice; return the rows."""
    with SegmentStore(directory, now_ns=lambda: START_NS) as store:
        for step in range(num_files):
            committed(store, step_totals(range(6), range(max(0, step - 1), step + 1)))
    return step_totals(range(6), range(num_files))


def grown_old(directory: Path) -> None:
    """Set the times of files to before the grace period."""
    moment = time.time() - 2 * GRACE_S
    for path in segment_paths(directory):
        os.utime(path, (moment, moment))


def live(directory: Path) -> list[Path]:
    return not_superseded(segment_paths(directory))


def test_files_of_an_hour_become_one_with_the_same_rows(tmp_path: Path) -> None:
    expected = filled(tmp_path, 5)

    compact(tmp_path, LATER_NS)

    (merged,) = live(tmp_path)
    name = parse_name(merged.name)
    assert name is not None
    assert (name.first, name.last) == (1, 5)
    assert len(segment_paths(tmp_path)) == 6
    events = StoredEvents(tmp_path)
    np.testing.assert_array_equal(events.read(StepTotals).sum_ns, expected.sum_ns)
    assert events.problems() == ()
    table = pq.read_table(merged)
    assert table.num_rows == num_rows(expected), "repeated rows are removed"
    places = list(zip(*(table.column(name).to_pylist() for name in ("operation", "step", "rank")), strict=True))
    names = ["forward-compute", "backward-compute", "grads-reduce-scatter"]
    assert list(dict.fromkeys(name for name, _, _ in places)) == names
    assert places == sorted(places, key=lambda place: (names.index(place[0]), *place[1:]))


def test_merged_files_are_removed_after_readers_had_time(tmp_path: Path) -> None:
    expected = filled(tmp_path, 5)
    compact(tmp_path, LATER_NS)
    compact(tmp_path, LATER_NS)
    assert len(segment_paths(tmp_path)) == 6

    grown_old(tmp_path)
    compact(tmp_path, LATER_NS)

    assert len(segment_paths(tmp_path)) == 1
    np.testing.assert_array_equal(StoredEvents(tmp_path).read(StepTotals).sum_ns, expected.sum_ns)


def test_current_hour_is_merged_only_with_many_files(tmp_path: Path) -> None:
    filled(tmp_path, 5)

    compact(tmp_path, START_NS)

    assert len(segment_paths(tmp_path)) == 5


def test_new_files_continue_the_numbers_of_merged_ones(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    compact(tmp_path, LATER_NS)

    with SegmentStore(tmp_path, now_ns=lambda: START_NS) as store:
        committed(store, step_totals(range(6), range(3, 5)))
    compact(tmp_path, LATER_NS)

    (merged,) = live(tmp_path)
    assert merged.name.startswith("000000000001-000000000004.")
    np.testing.assert_array_equal(
        StoredEvents(tmp_path).read(StepTotals).sum_ns, step_totals(range(6), range(5)).sum_ns
    )


def test_damaged_segment_is_set_aside_and_the_others_are_merged(tmp_path: Path) -> None:
    filled(tmp_path, 4)
    victim = segment_paths(tmp_path)[1]
    content = bytearray(victim.read_bytes())
    content[40] ^= 1
    victim.write_bytes(content)

    compact(tmp_path, LATER_NS)
    assert len(live(tmp_path)) == 3, "none is merged"
    compact(tmp_path, LATER_NS)

    (merged,) = live(tmp_path)
    kept = victim.with_name(victim.name + ".damaged")
    assert kept.read_bytes() == bytes(content)
    events = StoredEvents(tmp_path)
    assert set(events.read(StepTotals).step.tolist()) == {0, 1, 2, 3}, "step 1 was in the next file too"
    assert events.problems() == (f"{kept}: was found damaged by the daemon; its events are missing",)
    SegmentStore(tmp_path).close()
    compact(tmp_path, LATER_NS)
    assert live(tmp_path) == [merged]


@pytest.mark.slow
def test_readers_see_every_row_during_compaction(tmp_path: Path) -> None:
    expected = filled(tmp_path, 24)
    events = StoredEvents(tmp_path)
    is_over = threading.Event()
    failures: list[str] = []
    num_reads = 0

    def read() -> None:
        nonlocal num_reads
        while not is_over.is_set() or num_reads < 3:
            found = events.read(StepTotals)
            if not np.array_equal(found.sum_ns, expected.sum_ns):
                failures.append(f"{num_rows(found)} rows, expected {num_rows(expected)}")
            num_reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(4):
        compact(tmp_path, LATER_NS)
        # without the grace period: readers find files removed, and must list the directory again
        grown_old(tmp_path)
        compact(tmp_path, LATER_NS)
        with SegmentStore(tmp_path, now_ns=lambda: START_NS) as store:
            committed(store, step_totals(range(6), range(4)))
            committed(store, step_totals(range(6), range(4, 8)))
    is_over.set()
    reader.join()

    assert failures == []
    assert events.problems() == ()


def files(*sizes: int) -> list[SmallFile]:
    return [SmallFile(Path(str(n)), SegmentName(n, n, 0), size) for n, size in enumerate(sizes, 1)]


def test_neighboring_small_files_are_merged() -> None:
    cases: tuple[tuple[list[int], bool, list[tuple[int, ...]]], ...] = (
        ([], True, []),
        ([5], True, []),
        ([5, 5], True, [(1, 2)]),
        ([5, 5], False, []),
        ([5] * (MAX_SMALL_FILES - 1), False, []),
        ([5] * MAX_SMALL_FILES, False, [tuple(range(1, MAX_SMALL_FILES + 1))]),
        ([MAX_BYTES // 4, MAX_BYTES // 4], False, [(1, 2)]),
        ([MAX_BYTES // 2, 5, 5, MAX_BYTES, 5], True, [(2, 3)]),
        ([MAX_BYTES // 3] * 7, True, [(1, 2, 3), (4, 5, 6)]),
    )
    for sizes, is_over, expected in cases:
        plan = plan_merges(files(*sizes), is_over=is_over)
        assert [tuple(file.name.first for file in run) for run in plan] == expected, (sizes, is_over)


def test_merged_files_are_neighbors_of_limited_size() -> None:
    sizes = np.random.default_rng(5).integers(1, MAX_BYTES // 2 + 10, 200).tolist()

    plan = plan_merges(files(*sizes), is_over=True)

    for run in plan:
        numbers = [file.name.first for file in run]
        assert numbers == list(range(numbers[0], numbers[0] + len(run)))
        assert sum(file.num_bytes for file in run) <= MAX_BYTES
    assert sum(len(run) for run in plan) > 100


def test_merged_file_replaces_the_files_that_it_contains() -> None:
    def path(first: int, last: int, hour: str = "05") -> Path:
        return Path(hour) / SegmentName(first, last, 0).text

    listed = [
        path(1, 1),
        path(2, 2),
        path(1, 2),
        path(3, 3),
        path(1, 3),
        path(4, 4),
        path(2, 2, "06"),
        Path("05/x.parquet"),
    ]

    assert not_superseded(listed) == [path(1, 3), path(4, 4), path(2, 2, "06"), Path("05/x.parquet")]
