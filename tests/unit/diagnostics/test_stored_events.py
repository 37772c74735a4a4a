"""Reading segments: the same rows as from memory; a damaged file costs no rows of other files."""

from __future__ import annotations

import os
import shutil
import threading
import zlib
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.columns.schema import to_arrow, to_stored
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import (
    NO_DURATION,
    Clocks,
    Groups,
    LogLines,
    Ranks,
    Spans,
    StepTotals,
    Values,
    columns_of,
    joined,
    num_rows,
)
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segment_store import SegmentStore
from megatrain_diagnostics.store.segments import SegmentName, write_segment
from tests.helpers.memory_events import MemoryEvents
from tests.helpers.stored_events import START_NS, committed, segment_paths, step_totals
from tests.helpers.table_rows import table_rows

HOUR_NS = 3600 * 10**9
PARTS = [
    step_totals(range(5), range(4)),
    step_totals(range(5, 9), range(4)),
    step_totals(range(9), range(4, 6)),
    step_totals(range(3, 7), range(6), round_number=2),
    step_totals(range(2, 4), range(3)),  # the same rows again, as a spool replays them
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredEvents:
    directory = tmp_path_factory.mktemp("events")
    with SegmentStore(directory) as store:
        for part in PARTS:
            committed(store, part)
    return StoredEvents(directory)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("steps")
    with SegmentStore(directory) as store:
        for step in range(3):
            committed(store, step_totals(range(4), range(step, step + 1)))
    return directory


@pytest.fixture
def directory(three_steps: Path, tmp_path: Path) -> Path:
    """Return a directory with three segments, of one step each."""
    return shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)


def assert_same_rows(found: StepTotals, expected: StepTotals) -> None:
    for name in columns_of(StepTotals):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


numbers = st.lists(st.integers(-1, 10), max_size=4).map(tuple)
steps = st.integers(-1, 7)
wheres = st.builds(
    Where,
    rounds=st.none() | numbers,
    first_step=st.none() | steps,
    last_step=st.none() | steps,
    ranks=st.none() | numbers,
    operations=st.none() | st.lists(st.sampled_from([3, 4, 10, 11, 300]), max_size=2).map(tuple),
    hosts=st.none() | st.just(("h0",)),
    first_ns=st.none() | steps.map(lambda step: START_NS + step * 10**9),
    last_ns=st.none() | steps.map(lambda step: START_NS + step * 10**9),
)


@given(where=wheres)
@settings(max_examples=40)
def test_rows_are_those_that_memory_gives(stored: StoredEvents, where: Where) -> None:
    expected = MemoryEvents({StepTotals: joined(StepTotals, PARTS)}).read(StepTotals, where)

    assert_same_rows(stored.read(StepTotals, where), expected)


def test_table_without_segments_has_no_rows(stored: StoredEvents) -> None:
    assert num_rows(stored.read(Spans)) == 0
    assert num_rows(stored.read(StepTotals, Where(rounds=(7,)))) == 0


def test_texts_choose_rows_and_are_never_sql(tmp_path: Path) -> None:
    hosts = ["a", "x' OR '1'='1", "\u00e9"]
    with SegmentStore(tmp_path) as store:
        store.append(Clocks, to_arrow(table_rows(Clocks, {"at_ns": [1, 2, 3], "host": hosts})))
        store.commit()
    events = StoredEvents(tmp_path)

    for number, host in enumerate(hosts):
        assert events.read(Clocks, Where(hosts=(host,))).at_ns.tolist() == [number + 1]
    assert num_rows(events.read(Clocks, Where(hosts=()))) == 0


def test_values_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    with SegmentStore(tmp_path) as store:
        columns = {"sequence": [1, 2, 3], "kind": [1, 2, 99], "value": [np.nan, np.inf, 1.5]}
        store.append(Values, to_arrow(table_rows(Values, columns)))
        store.commit()
    found = StoredEvents(tmp_path).read(Values)

    np.testing.assert_array_equal(found.value, [np.nan, np.inf, 1.5])
    assert found.kind.tolist() == [1, 2, 99]


def test_any_directory_of_segments_can_be_read(directory: Path, tmp_path: Path) -> None:
    flat = tmp_path / "copy [of] them?*"
    flat.mkdir()
    for number, path in enumerate(segment_paths(directory / "totals")):
        (flat / f"part {number}.parquet").write_bytes(path.read_bytes())
    expected = step_totals(range(4), range(3))

    for place in (directory, directory / "totals", next((directory / "totals").iterdir()), flat):
        assert_same_rows(StoredEvents(place).read(StepTotals), expected)


def test_directory_without_segments_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no segments of events below it"):
        StoredEvents(tmp_path).check_not_empty()
    with pytest.raises(DataError, match="cannot be listed: No such file"):
        StoredEvents(tmp_path / "nowhere").read(StepTotals)


def other_table(path: Path) -> None:
    pq.write_table(to_stored(Groups, to_arrow(joined(Groups, []))), path)


def other_columns(path: Path) -> None:
    pq.write_table(to_stored(StepTotals, to_arrow(step_totals(range(1), range(1)))).drop_columns(["step"]), path)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)


FOREIGN = {
    "empty": (lambda path: path.write_bytes(b""), "empty; it was set aside"),
    "text": (lambda path: path.write_text("PAR1 not really PAR1"), "not a whole Parquet file"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-20]), "not a whole Parquet file"),
    "cut in the middle": (lambda path: path.write_bytes(path.read_bytes()[:900]), "not a whole Parquet file"),
    "stranger's": (lambda path: pq.write_table(pa.table({"a": [1]}), path), "does not name a table"),
    "other columns": (other_columns, "totals: columns"),
    "rotten": (flipped, "its checksum does not match"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), ""),
    "of another table": (other_table, "holds the table groups"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_damaged_segment_is_set_aside_and_nothing_else_lost(directory: Path, name: str) -> None:
    damage, message = FOREIGN[name]
    victim = segment_paths(directory)[1]
    damage(victim)

    events = StoredEvents(directory)

    for _ in range(2):
        assert sorted(set(events.read(StepTotals).step.tolist())) == [0, 2]
    problems = [problem for problem in events.problems() if victim.name in problem]
    assert len(problems) == bool(message)
    assert all(message in problem for problem in problems)


def test_foreign_file_whose_pages_are_damaged_is_set_aside(directory: Path) -> None:
    # without a checksum in its name the damage is detected when its pages are read
    path = segment_paths(directory)[1]
    foreign = path.with_name("foreign.parquet")
    path.rename(foreign)
    content = bytearray(foreign.read_bytes())
    content[4:600] = bytes(596)
    foreign.write_bytes(content)

    events = StoredEvents(directory)

    assert sorted(set(events.read(StepTotals).step.tolist())) == [0, 2]
    assert [problem for problem in events.problems() if "foreign.parquet: cannot be read whole" in problem]


def rows_without_values(table: pa.Table) -> pa.Table:
    return changed(table, "sum_ns", pa.nulls(table.num_rows, pa.int64()))


def rows_of_no_text(table: pa.Table) -> pa.Table:
    offsets = pa.array(np.arange(table.num_rows + 1, dtype=np.int32)).buffers()[1]
    letters = pa.py_buffer(b"\xff" * table.num_rows)
    return changed(table, "operation", pa.Array.from_buffers(pa.string(), table.num_rows, [None, offsets, letters]))


def changed(table: pa.Table, column: str, values: pa.Array) -> pa.Table:
    place = table.schema.get_field_index(column)
    return table.set_column(place, pa.field(column, values.type, nullable=True), values)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda batch: rows_without_values(to_stored(StepTotals, batch)), "sum_ns: rows without a value"),
        (lambda batch: rows_of_no_text(to_stored(StepTotals, batch)), "Invalid UTF8"),
        (lambda batch: pa.Table.from_batches([batch]), "operation is stored as numbers"),
    ],
    ids=["without values", "no text", "stored as numbers"],
)
@pytest.mark.parametrize("has_our_name", [False, True])
def test_invalid_foreign_rows_cost_no_others(directory: Path, made: Any, message: str, has_our_name: bool) -> None:
    place = segment_paths(directory)[0].with_name("foreign.parquet")
    pq.write_table(made(to_arrow(step_totals(range(2), range(7, 8)))), place)
    if has_our_name:
        place = place.rename(place.with_name(SegmentName(90, 90, zlib.crc32(place.read_bytes())).text))

    events = StoredEvents(directory)

    for _ in range(2):
        assert sorted(set(events.read(StepTotals).step.tolist())) == [0, 1, 2]
    (problem,) = events.problems()
    assert place.name in problem
    assert message in problem


def test_fifo_of_a_segments_name_does_not_block(directory: Path) -> None:
    os.mkfifo(segment_paths(directory)[0].with_name("pipe.parquet"))

    assert num_rows(StoredEvents(directory).read(StepTotals)) == 36


def test_events_from_the_future_are_reported(tmp_path: Path) -> None:
    with SegmentStore(tmp_path, now_ns=lambda: START_NS) as store:
        committed(store, step_totals(range(2), range(1)))
        committed(store, step_totals(range(2, 4), range(1), start_ns=START_NS + 3 * HOUR_NS))
    events = StoredEvents(tmp_path)

    assert num_rows(events.read(StepTotals)) == 12
    (problem,) = events.problems()
    assert "events from the future, up to 3.0 h ahead of the daemon" in problem
    assert problem.startswith(str(segment_paths(tmp_path)[1]))


def test_operations_of_a_newer_program_are_reported(tmp_path: Path) -> None:
    stored = to_stored(StepTotals, to_arrow(step_totals(range(1), range(1))))
    newer = pa.array(["forward-compute", "moe-dispatch", "clip"], pa.string()).dictionary_encode()
    column = stored.schema.get_field_index("operation")
    write_segment(tmp_path, 1, 1, stored.set_column(column, "operation", newer), 0)
    events = StoredEvents(tmp_path)

    assert events.read(StepTotals).operation.tolist() == [3, 0, 17]
    assert events.problems() == ("totals: contains rows of a newer version of megatrain with an unknown operation",)


def test_span_stored_open_and_ended_is_one_row(tmp_path: Path) -> None:
    with SegmentStore(tmp_path) as store:
        for duration_ns in (NO_DURATION, 77, NO_DURATION):
            store.append(Spans, to_arrow(table_rows(Spans, {"duration_ns": duration_ns})))
            store.commit()

    assert StoredEvents(tmp_path).read(Spans).duration_ns.tolist() == [77]


def test_queries_print_no_progress_bar(stored: StoredEvents) -> None:
    shown = stored.query(StepTotals, Where(), "SELECT current_setting('enable_progress_bar') AS shown FROM segments")

    assert shown is not None
    assert set(shown.column("shown").to_pylist()) == {False}


def test_threads_can_read_at_the_same_time(stored: StoredEvents) -> None:
    expected = num_rows(stored.read(StepTotals))
    found: list[int] = []

    threads = [
        threading.Thread(target=lambda: found.extend(num_rows(stored.read(StepTotals)) for _ in range(5)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [expected] * 20


def test_rows_of_ranks_are_read_back(tmp_path: Path) -> None:
    columns = {
        name: [f"{name}\n\u4e16", ""] if dtype == "text" else [3, 4] for name, dtype in columns_of(Ranks).items()
    }
    with SegmentStore(tmp_path) as store:
        store.append(Ranks, to_arrow(table_rows(Ranks, columns)))
        store.commit()

    found = StoredEvents(tmp_path).read(Ranks)

    assert found.host.tolist() == ["host\n\u4e16", ""]
    assert astuple(found)[0].tolist() == [3, 4]
    assert num_rows(StoredEvents(tmp_path).read(LogLines)) == 0
