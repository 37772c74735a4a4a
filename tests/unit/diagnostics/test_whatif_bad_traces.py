"""Damaged, foreign and contradictory traces: refused with a message, or without their bad steps; never a NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.whatif import OperationTable, make_model, what_if
from megatrain_diagnostics.analysis.whatif.figures import public_figures
from megatrain_diagnostics.store.public_trace import read_meta, read_trace, write_meta, write_trace
from tests.helpers.pipeline_job import PipelineJob

JOB = PipelineJob(pp_size=2, dp_size=3, noise=0.2, steps=(10, 20, 30, 40))
TABLE = JOB.run()
META = "trial_name: made\nrun_id: 0\ndp_size: 3\ndsp_size: 1\npp_size: 2\ntp_size: 1\nvpp_size: 1\nworld_size: 6\n"


def changed(rows: Any, **columns: Any) -> OperationTable:
    """Return the table with other values in some rows."""
    arrays = {}
    for name, value in columns.items():
        array = getattr(TABLE, name).copy()
        array[rows] = value
        arrays[name] = array
    return replace(TABLE, **arrays)


def in_step(step: int) -> Any:
    return np.flatnonzero(
        (TABLE.step == step) & (TABLE.kind == TABLE.kinds.index("forward-compute")) & (TABLE.dp_rank == 1)
    )


def steps_used(table: OperationTable) -> tuple[list[int], str]:
    result = what_if(make_model(table, JOB.shape))
    assert_all_numbers(public_figures(result, JOB.shape))
    return list(result.measured_s), "; ".join(result.notes)


def assert_all_numbers(value: Any) -> None:
    if isinstance(value, dict):
        for one in value.values():
            assert_all_numbers(one)
    elif isinstance(value, float):
        assert math.isfinite(value)


def bad_steps() -> Iterator[tuple[OperationTable, list[int], tuple[str, ...]]]:
    """Yield tables, the steps of each that can be analyzed, and texts in the notes."""
    for bad in (float("nan"), float("inf"), -1.0):
        note = "step 20 is left out: 1 operation with a time that is negative or not a number"
        yield changed(in_step(20)[:1], duration_s=bad), [10, 30, 40], (note,)
    without_a_rank = TABLE.where(~((TABLE.step == 30) & (TABLE.dp_rank == 2)))
    yield without_a_rank, [10, 20, 40], ("step 30 is left out", "of dp rank 2")
    yield TABLE.where(~((TABLE.step == 30) & (TABLE.dp_rank > 0))), [10, 20, 40], ("of dp ranks 1-2",)
    twice = np.concatenate([np.arange(TABLE.num_rows), in_step(10)[:1]])
    columns = {field.name: getattr(TABLE, field.name)[twice] for field in fields(TABLE) if field.name != "kinds"}
    with_one_twice = OperationTable(kinds=TABLE.kinds, **columns)
    yield with_one_twice, [20, 30, 40], ("1 operation that most steps do not have",)
    yield TABLE.where(~((TABLE.step == 10) & (TABLE.dp_rank == 0))), [20, 30, 40], ("step 10 is left out",)
    rows = (TABLE.step == 40) & (TABLE.dp_rank == 1) & (TABLE.start_s > 0.5)
    an_hour_later = changed(rows, start_s=TABLE.start_s[rows] + 3600.0)
    yield an_hour_later, [10, 20, 30], ("step 40 is left out: its times span 36",)
    with_unknown_kind = replace(TABLE, kinds=tuple("prophecy" if kind == "gc" else kind for kind in TABLE.kinds))
    yield with_unknown_kind, [10, 20, 30, 40], ("'prophecy'",)
    yield TABLE.where(TABLE.dp_rank < 2), [10, 20, 30, 40], ("2 of 3 data-parallel ranks",)


def test_bad_steps_are_left_out_with_a_note() -> None:
    for table, expected, texts in bad_steps():
        used, notes = steps_used(table)
        assert used == expected, texts
        for text in texts:
            assert text in notes


def test_times_of_a_step_may_count_from_anywhere() -> None:
    moved = replace(TABLE, start_s=TABLE.start_s + TABLE.step * 1000.0 + 1.78e9)
    there, here = what_if(make_model(moved, JOB.shape)), what_if(make_model(TABLE, JOB.shape))
    assert there.slowdown == pytest.approx(here.slowdown, rel=1e-5)


def test_job_where_nothing_takes_time_has_no_slowdown() -> None:
    still = replace(TABLE, start_s=np.zeros_like(TABLE.start_s), duration_s=np.zeros_like(TABLE.duration_s))
    result = what_if(make_model(still, JOB.shape))
    assert (result.slowdown, result.waste, result.workers.rem) == (1.0, 0.0, 0.0)
    assert_all_numbers(public_figures(result, JOB.shape))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE.where(np.zeros(TABLE.num_rows, dtype=bool)), "contains no operations"),
        (changed([0], dp_rank=3), "dp_rank is from 0 to 3; it must be from 0 to 2"),
        (changed([0], stage=-1), "stage is from -1"),
        (changed([0], sequence=10**12), "seq_id is from 0 to 1000000000000"),
        (replace(TABLE, duration_s=np.full(TABLE.num_rows, np.nan)), "no step has all operations"),
        (replace(TABLE, kinds=tuple("x" + kind for kind in TABLE.kinds)), "no known operation"),
        (replace(TABLE, kinds=("forward-send-backward-recv", *TABLE.kinds[1:])), "are not supported"),
        (
            TABLE.where((TABLE.kind != TABLE.kinds.index("forward-recv")) | (TABLE.sequence > 0)),
            "stage 0 has 4 forward-send and stage 1 3 forward-recv",
        ),
    ],
)
def test_contradictory_traces_are_refused(table: OperationTable, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_model(table, JOB.shape)


def unequal_replicas(counts: tuple[int, ...]) -> OperationTable:
    """Return the trace of replicas that have these numbers of micro-batches."""
    tables = {count: replace(JOB, num_microbatches=count).run() for count in set(counts)}
    chosen = [tables[count].where(tables[count].dp_rank == dp) for dp, count in enumerate(counts)]
    assert len({table.kinds for table in chosen}) == 1
    columns = {
        field.name: np.concatenate([getattr(table, field.name) for table in chosen])
        for field in fields(OperationTable)
        if field.name != "kinds"
    }
    return OperationTable(kinds=chosen[0].kinds, **columns)


IS_LOST = (TABLE.sequence == 3) & (TABLE.dp_rank == 1) & (TABLE.stage == 1)
UNEQUAL = [
    (unequal_replicas((4, 3, 3)), "unequal numbers .* step 10 .* of dp rank 0 computes 4 forwards, of dp rank 1 3"),
    (unequal_replicas((4, 4, 3)), "unequal numbers .* of dp rank 0 computes 4 forwards, of dp rank 2 3"),
    (TABLE.where(~IS_LOST), "no step has all operations .* missing .of dp rank 1"),
    (TABLE.where((TABLE.dp_rank != 1) | (TABLE.kind != TABLE.kinds.index("forward-compute"))), "no step has all"),
]


@pytest.mark.parametrize(("table", "message"), UNEQUAL)
def test_unequal_replicas_are_distinguished_from_lost_rows(table: OperationTable, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_model(table, JOB.shape)


@settings(max_examples=40)
@given(
    data=st.data(),
    column=st.sampled_from(["dp_rank", "stage", "rank", "step", "kind", "start_s", "duration_s", "sequence", "chunk"]),
)
def test_any_few_values_changed_give_figures_or_a_refusal(data: st.DataObject, column: str) -> None:
    rows = data.draw(st.lists(st.integers(0, TABLE.num_rows - 1), min_size=1, max_size=4))
    if column.endswith("_s"):
        value = data.draw(st.floats(allow_nan=True, allow_infinity=True))
    elif column == "kind":
        value = data.draw(st.integers(0, len(TABLE.kinds) - 1))
    else:
        value = data.draw(st.integers(-3, 2**40))
    with suppress(DataError):
        used, notes = steps_used(changed(rows, **{column: value}))
        assert set(used) <= {10, 20, 30, 40}
        assert len(used) == 4 or "is left out" in notes


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, TABLE)
    whole = path.read_bytes()
    for content in (b"", b"not parquet at all", whole[: len(whole) // 2], whole[4:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as a Parquet file"):
            read_trace(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "none.parquet")
    pq.write_table(pa.table({"step": [1], "optype": ["gc"]}), path)
    with pytest.raises(DataError, match="no column dp_rank, stage"):
        read_trace(path)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("step", pa.array([None], pa.int64()), "step is missing in 1 row"),
        ("dp_rank", pa.array(["0"]), "dp_rank must be whole numbers, found string"),
        ("start_ts", pa.array(["now"]), "start_ts must be seconds, found string"),
        ("optype", pa.array([None], pa.string()), "optype must be text"),
        ("optype", pa.array([7]), "optype must be text"),
        ("seq_id", pa.array([0.5]), "seq_id must be whole numbers"),
        ("seq_id", pa.array([math.inf]), "seq_id must be whole numbers"),
        ("seq_id", pa.array([1e300]), "seq_id must be whole numbers"),
    ],
)
def test_columns_of_another_type_are_refused(tmp_path: Path, column: str, values: pa.Array, message: str) -> None:
    write_trace(tmp_path / "t.parquet", TABLE.where(np.arange(TABLE.num_rows) < 1))
    table = pq.read_table(tmp_path / "t.parquet")
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, values), tmp_path / "u.parquet")
    with pytest.raises(DataError, match=message):
        read_trace(tmp_path / "u.parquet")


def test_metadata_is_read_as_written(tmp_path: Path) -> None:
    write_meta(tmp_path / "m.yaml", JOB.shape)
    assert read_meta(tmp_path / "m.yaml") == JOB.shape
    (tmp_path / "m.yaml").write_text("---\n# a comment\n" + META.replace("made", "'made'  # its name") + "extra: yes\n")
    assert read_meta(tmp_path / "m.yaml") == JOB.shape


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (META.replace("trial_name: made\n", ""), "no trial_name"),
        (META.replace("dp_size: 3", "dp_size: three"), "dp_size: 'three' is not a whole number"),
        (META.replace("dp_size: 3", "dp_size: 4"), "world_size=6 of job 'made' must be .* = 8"),
        (META.replace("pp_size: 2", "pp_size: 0"), "pp_size=0 of job 'made' must be at least 1"),
        ("trial_name: x\nsizes:\n  - 3\n", "m.yaml:3: '- 3' is not a line"),
        ("\x00\xff" * 9, "is not a line|cannot be read"),
    ],
)
def test_invalid_metadata_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(DataError, match=message):
        read_meta(tmp_path / "m.yaml")


def without_negatives(column: pa.ChunkedArray, missing: float | None, kind: pa.DataType) -> pa.Array:
    return pa.array([missing if one < 0 else one for one in column.to_pylist()], kind)


FORMS = {
    "optype as text": ("optype", lambda column: column.cast(pa.string())),
    "optype as large text": ("optype", lambda column: column.cast(pa.string()).cast(pa.large_string())),
    "optype as views": ("optype", lambda column: column.cast(pa.string()).cast(pa.string_view())),
    "seq_id as floats": ("seq_id", lambda column: column.cast(pa.float64())),
    "mc as integers with gaps": ("mc", lambda column: without_negatives(column, None, pa.int8())),
    "mb_id as floats with gaps": ("mb_id", lambda column: without_negatives(column, None, pa.float32())),
    "gmc as floats with NaN": ("gmc", lambda column: without_negatives(column, math.nan, pa.float64())),
}


def test_columns_are_read_in_the_forms_of_all_writers(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", TABLE)
    written = pq.read_table(tmp_path / "trace.parquet")
    found = {"as written": read_trace(tmp_path / "trace.parquet")}
    for form, (name, change) in FORMS.items():
        place = written.column_names.index(name)
        pq.write_table(written.set_column(place, name, change(written.column(name))), tmp_path / "other.parquet")
        found[form] = read_trace(tmp_path / "other.parquet")

    for form, table in found.items():
        for field in fields(TABLE):
            if field.name not in ("kinds", "kind"):
                assert np.array_equal(getattr(table, field.name), getattr(TABLE, field.name)), (form, field.name)
        assert [table.kinds[kind] for kind in table.kind] == [TABLE.kinds[kind] for kind in TABLE.kind], form
