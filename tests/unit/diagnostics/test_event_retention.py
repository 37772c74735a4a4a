"""Retention by hours and bytes; the table of ranks stays as long as any event of its round."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.tables import Ranks, StepTotals
from megatrain_diagnostics.store.event_store import EventStore
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.retention import Retention, expire
from megatrain_diagnostics.store.segments import not_superseded
from tests.helpers.stored_events import START_NS, segment_paths, step_totals
from tests.helpers.table_rows import table_rows

HOUR_NS = 3600 * 10**9
NO_LIMIT = 1e18


@pytest.fixture(scope="module")
def ten_hours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return events of ten hours, of one step each; round 2 begins with hour 5, and each round has rows of ranks."""
    directory = tmp_path_factory.mktemp("hours")
    now_ns = START_NS
    with EventStore(directory, now_ns=lambda: now_ns) as store:
        for hour in range(10):
            now_ns = START_NS + hour * HOUR_NS
            round_number = 1 if hour < 5 else 2
            if hour in (0, 5):
                store.append(Ranks, to_arrow(table_rows(Ranks, {"round": round_number})))
            store.append(
                StepTotals, to_arrow(step_totals(range(200), range(hour, hour + 1), round_number=round_number))
            )
            store.commit()
    return directory


@pytest.fixture
def store(ten_hours: Path, tmp_path: Path) -> EventStore:
    """Return a closed store with a copy of these events."""
    with EventStore(shutil.copytree(ten_hours, tmp_path / "events")) as store:
        return store


def kept(store: EventStore) -> tuple[list[int], list[int]]:
    """Return the steps and rounds that have events."""
    return (
        np.unique(store.read(StepTotals).step).tolist(),
        store.read(Ranks).round.tolist(),
    )


NOW_NS = START_NS + 9 * HOUR_NS


@pytest.mark.parametrize(
    ("hours", "first_kept", "rounds"), [(48, 0, [1, 2]), (4.5, 4, [1, 2]), (3.5, 5, [2]), (2.5, 6, [2])]
)
def test_old_hours_are_removed(store: EventStore, hours: float, first_kept: int, rounds: list[int]) -> None:
    # START_NS is 13 minutes into an hour: the directory of step n ends 47 minutes after it was written
    kept_bytes = expire(store.directory, Retention(hours=hours, num_bytes=NO_LIMIT), NOW_NS)

    assert kept(store) == (list(range(first_kept, 10)), rounds)
    assert kept_bytes == sum(path.stat().st_size for path in segment_paths(store.directory))
    assert len([path for path in store.directory.glob("totals/*/*") if path.is_dir()]) == 10 - first_kept


def test_newest_round_is_known_when_all_its_events_are_gone(store: EventStore) -> None:
    expire(store.directory, Retention(hours=1, num_bytes=NO_LIMIT), NOW_NS + 1000 * HOUR_NS)

    assert kept(store) == ([], [2])


def test_oldest_files_beyond_the_size_are_removed(store: EventStore) -> None:
    sizes = [path.stat().st_size for path in segment_paths(store.directory)]
    limit = sum(sizes) - 3 * min(sizes)

    expire(store.directory, Retention(hours=48, num_bytes=limit), NOW_NS)

    steps, rounds = kept(store)
    assert steps == list(range(steps[0], 10))
    assert rounds == [1, 2]
    assert sum(path.stat().st_size for path in segment_paths(store.directory)) <= limit
    assert sum(path.stat().st_size for path in segment_paths(store.directory)) > limit - max(sizes)


def test_damaged_files_expire_and_foreign_ones_stay(store: EventStore) -> None:
    victim = segment_paths(store.directory / "totals")[0]
    note = victim.with_name("note.txt")
    note.write_text("mine")
    victim.rename(victim.with_name(victim.name + ".damaged"))
    events = StoredEvents(store.directory)
    events.read(StepTotals)
    assert any("found damaged" in problem for problem in events.problems())

    expire(store.directory, Retention(hours=1, num_bytes=NO_LIMIT), NOW_NS)

    assert not list(store.directory.rglob("*.damaged"))
    assert note.read_text() == "mine"


def test_store_removes_old_files_before_it_merges(tmp_path: Path) -> None:
    now_ns = START_NS
    with EventStore(tmp_path, now_ns=lambda: now_ns) as store:
        for step in range(4):
            now_ns = START_NS + (step // 2) * 5 * HOUR_NS
            store.append(StepTotals, to_arrow(step_totals(range(4), range(step, step + 1))))
            store.commit()
        now_ns += 2 * HOUR_NS

        store.maintain(Retention(hours=3, num_bytes=NO_LIMIT))

        (merged,) = not_superseded(segment_paths(tmp_path))
        assert merged.name.startswith("000000000003-000000000004.")
        np.testing.assert_array_equal(store.read(StepTotals).sum_ns, step_totals(range(4), range(2, 4)).sum_ns)
