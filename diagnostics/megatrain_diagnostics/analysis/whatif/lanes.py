"""Arranges trace rows in arrays of times [operation, dp rank, step].

All steps and data-parallel ranks must have the same operations. A step with other operations, or with invalid times, is
left out and reported, so that one bad rank or clock affects only some steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import DataError
from megatrain.formatting import count_text, ranks_text
from megatrain_diagnostics.analysis.medians import median
from megatrain_diagnostics.analysis.whatif.kinds import KNOWN_KINDS
from megatrain_diagnostics.analysis.whatif.operations import JobShape, OperationTable
from megatrain_diagnostics.events.tables import Flags, Float64, Int64

LONGEST_STEP_S = 6 * 3600.0
"""Longer than any step. A larger range of times within one step is due to a clock that jumped, or invalid times."""
CLOCK_JUMP_S = 60.0
"""A step that is longer than the median by this time AND ten times as long contains a jump of a clock."""
MAX_CELLS = 1 << 28
"""Limit of operations x dp ranks x steps. Traces of 12,288 ranks and 10 steps have 2^24."""


@dataclass(frozen=True, slots=True)
class OperationKey:
    """One operation of a pipeline."""

    kind: str
    sequence: int
    stage: int
    chunk: int
    model_chunk: int

    def __str__(self) -> str:
        return f"{self.kind} {self.sequence} of stage {self.stage}"


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """The times of all operations. Shapes: start_s, duration_s [operation, dp rank, step]; steps [step]; ranks
    [dp rank, stage]."""

    keys: tuple[OperationKey, ...]
    start_s: Float64
    """Relative to the first start of the step."""
    duration_s: Float64
    steps: Int64
    ranks: Int64
    """Global rank, or the first of the ranks that were combined into a row."""
    notes: tuple[str, ...]
    """A sentence for each part that was left out."""

    @property
    def num_stages(self) -> int:
        return int(self.ranks.shape[1])


def make_lanes(table: OperationTable, shape: JobShape) -> Lanes:
    """Arrange rows by operation, data-parallel rank and step.

    Raises: DataError if no step is complete, or rows have impossible ranks or numbers.
    """
    notes: list[str] = []
    table = _known_rows(table, notes)
    _check_numbers(table, shape)
    num_stages, num_dp = int(table.stage.max()) + 1, int(table.dp_rank.max()) + 1
    if num_dp < shape.dp_size or num_stages < shape.pp_size:
        notes.append(
            f"the trace has {num_dp} of {shape.dp_size} data-parallel ranks and {num_stages} of {shape.pp_size} stages"
        )
    steps = np.unique(table.step)
    place = _places(table, steps, num_stages, num_dp)
    whole = _whole_steps(table, steps, place, num_dp, notes)
    start_s, duration_s = place.fill(table.start_s), place.fill(table.duration_s)
    start_s, duration_s = start_s[place.is_usual][:, :, whole], duration_s[place.is_usual][:, :, whole]
    start_s -= start_s.min(axis=(0, 1))
    chosen = _without_jumps(start_s, duration_s, steps[whole], notes)
    if not chosen.any():
        raise DataError("no step can be used: " + "; ".join(notes))
    return Lanes(
        keys=_keys(table, place, num_dp),
        start_s=start_s if chosen.all() else start_s[:, :, chosen],
        duration_s=duration_s if chosen.all() else duration_s[:, :, chosen],
        steps=steps[whole][chosen],
        ranks=_ranks(table, num_dp, num_stages),
        notes=tuple(notes),
    )


@dataclass(slots=True, eq=False)
class _Places:
    """The place of each row: `cell` is its flat index in `shape`; `operations` are the sorted codes of operations."""

    cell: Int64
    operations: Int64
    operation_of: Int64
    step_of: Int64
    shape: tuple[int, int, int]
    is_usual: Flags
    """Mask of the operations that most cells have. A step without one of them is left out."""

    def fill(self, column: Float64) -> Float64:
        filled = np.zeros(self.shape)
        filled.reshape(-1)[self.cell] = column
        return filled


def _known_rows(table: OperationTable, notes: list[str]) -> OperationTable:
    if not table.num_rows:
        raise DataError("the trace contains no operations")
    combined = [kind for kind in table.kinds if kind.startswith(("forward-send-", "backward-send-"))]
    if combined:
        raise DataError(f"operations that both send and receive are not supported: {', '.join(combined)}")
    unknown = [number for number, kind in enumerate(table.kinds) if kind not in KNOWN_KINDS]
    if not unknown:
        return table
    is_known = ~np.isin(table.kind, unknown)
    if not is_known.all():
        names = ", ".join(repr(table.kinds[number]) for number in unknown if (table.kind == number).any())
        notes.append(f"operations outside the model are left out: {names}")
    if not is_known.any():
        raise DataError(f"the trace contains no known operation; {notes[-1]}")
    return table.where(is_known)


def _check_numbers(table: OperationTable, shape: JobShape) -> None:
    limits = {
        "dp_rank": (table.dp_rank, shape.dp_size),
        "stage": (table.stage, shape.pp_size),
        "seq_id": (table.sequence, table.num_rows),
    }
    for name, (column, limit) in limits.items():
        least, most = int(column.min()), int(column.max())
        if least < 0 or most >= limit:
            raise DataError(f"{name} is from {least} to {most}; it must be from 0 to {limit - 1}")


def _places(table: OperationTable, steps: Int64, num_stages: int, num_dp: int) -> _Places:
    num_sequences = int(table.sequence.max()) + 1
    num_codes = num_stages * len(table.kinds) * num_sequences
    if num_codes > MAX_CELLS:
        raise DataError(f"seq_id goes up to {num_sequences - 1}: too large for {table.num_rows} operations")
    code = (table.stage * len(table.kinds) + table.kind) * num_sequences + table.sequence
    is_there = np.zeros(num_codes, dtype=bool)
    is_there[code] = True
    operations = np.flatnonzero(is_there)
    number_of = np.zeros(num_codes, dtype=np.int64)
    number_of[operations] = np.arange(len(operations))
    num_lanes = num_dp * len(steps)
    if len(operations) * num_lanes > MAX_CELLS:
        raise DataError(
            f"{len(operations)} operations, {num_dp} data-parallel ranks and {len(steps)} steps are too much for "
            f"{table.num_rows} rows; choose fewer steps"
        )
    operation_of, step_of = number_of[code], np.searchsorted(steps, table.step)
    cell = (operation_of * num_dp + table.dp_rank) * len(steps) + step_of
    every = np.ones(len(operations), dtype=bool)
    return _Places(cell, operations, operation_of, step_of, (len(operations), num_dp, len(steps)), every)


def _whole_steps(table: OperationTable, steps: Int64, place: _Places, num_dp: int, notes: list[str]) -> Flags:
    """Return which steps have each usual operation once on each rank, no other operations, and only valid times."""
    counts = np.bincount(place.cell, minlength=int(np.prod(place.shape))).reshape(place.shape)
    place.is_usual = (counts > 0).sum(axis=(1, 2)) * 2 > num_dp * len(steps)
    usual = place.is_usual[:, np.newaxis, np.newaxis]
    is_bad_row = ~(np.isfinite(table.start_s) & np.isfinite(table.duration_s) & (table.duration_s >= 0.0))
    num_bad = np.bincount(place.step_of[is_bad_row], minlength=len(steps))
    num_missing = ((counts == 0) & usual).sum(axis=(0, 1))
    num_surplus = (counts * ~usual).sum(axis=(0, 1)) + (np.maximum(counts - 1, 0) * usual).sum(axis=(0, 1))
    for index in np.flatnonzero(num_bad + num_missing + num_surplus).tolist():
        reasons = [
            f"{count_text(number, 'operation')} {what}"
            for number, what in (
                (int(num_missing[index]), f"missing ({_who_lacks(counts[:, :, index], usual[:, :, 0])})"),
                (int(num_surplus[index]), "that most steps do not have, or repeated"),
                (int(num_bad[index]), "with a time that is negative or not a number"),
            )
            if number
        ]
        notes.append(f"step {steps[index]} is left out: {', '.join(reasons)}")
    whole: Flags = num_bad + num_missing + num_surplus == 0
    if not whole.any() or not place.is_usual.any():
        _refuse_unequal_replicas(table, steps, place, num_dp)
        raise DataError("no step has all operations of all ranks: " + "; ".join(notes[:3]))
    return whole


def _refuse_unequal_replicas(table: OperationTable, steps: Int64, place: _Places, num_dp: int) -> None:
    """Raise DataError if replicas computed unequal numbers of micro-batches in every step.

    If only rows of one rank are lost, the stages of its replica have unequal numbers, and nothing is raised.
    """
    kinds = [number for number, kind in enumerate(table.kinds) if kind == Operation.FORWARD_COMPUTE]
    rows = np.flatnonzero(np.isin(table.kind, kinds))
    shape = (num_dp, int(table.stage.max()) + 1, len(steps))
    cell = np.ravel_multi_index((table.dp_rank[rows], table.stage[rows], place.step_of[rows]), shape)
    forwards = np.bincount(cell, minlength=int(np.prod(shape))).reshape(shape)
    of_replica = forwards[:, 0]
    is_whole = (forwards == forwards[:, :1]).all(axis=(0, 1)) & (of_replica > 0).all(axis=0)
    if not (is_whole & (of_replica.min(axis=0) < of_replica.max(axis=0))).all():
        return
    most, least = int(of_replica[:, 0].argmax()), int(of_replica[:, 0].argmin())
    raise DataError(
        f"replicas have unequal numbers of micro-batches: in step {steps[0]} a stage of dp rank {most} computes "
        f"{of_replica[most, 0]} forwards, of dp rank {least} {of_replica[least, 0]}. What-if compares the same "
        "operations of all replicas; `megatrain diag stragglers` compares ranks per micro-batch"
    )


def _who_lacks(counts: Int64, usual: Flags) -> str:
    lacking = np.flatnonzero(((counts == 0) & usual).any(axis=0)).tolist()
    return f"of dp {ranks_text(lacking, 4)}"


def _without_jumps(start_s: Float64, duration_s: Float64, steps: Int64, notes: list[str]) -> Flags:
    spread = (start_s + duration_s).max(axis=(0, 1))
    usual = median(spread)
    longest = min(LONGEST_STEP_S, max(10.0 * usual, usual + CLOCK_JUMP_S))
    fits: Flags = spread <= longest
    for index in np.flatnonzero(~fits).tolist():
        notes.append(f"step {steps[index]} is left out: its times span {spread[index]:.6g} s; a clock has jumped")
    return fits


def _keys(table: OperationTable, place: _Places, num_dp: int) -> tuple[OperationKey, ...]:
    """Return the keys of the usual operations, with the chunks of the first data-parallel rank."""
    row_of = np.full(len(place.operations), -1, dtype=np.int64)
    for rows in _rows_of_last_choice(table):
        row_of[place.operation_of[rows]] = rows
    rows = row_of[place.is_usual]
    columns = zip(
        table.kind[rows].tolist(), table.sequence[rows].tolist(), table.stage[rows].tolist(),
        table.chunk[rows].tolist(), table.model_chunk[rows].tolist(), strict=True,
    )  # fmt: skip
    return tuple(OperationKey(table.kinds[kind], *numbers) for kind, *numbers in columns)


def _rows_of_last_choice(table: OperationTable) -> Iterator[Int64]:
    """Yield all rows, then the rows of data-parallel rank 0, which thus take precedence."""
    yield np.arange(table.num_rows)
    yield np.flatnonzero(table.dp_rank == 0)


def _ranks(table: OperationTable, num_dp: int, num_stages: int) -> Int64:
    ranks = np.full((num_dp, num_stages), -1, dtype=np.int64)
    ranks[table.dp_rank, table.stage] = table.rank
    return ranks
