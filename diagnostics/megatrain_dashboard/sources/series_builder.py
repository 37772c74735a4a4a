"""The results of each step of the whole run in bounded memory: loss, gradient norm, time, tokens, MFU.

There is one entry for each step. When there are 16,384 entries, the entries of the older half are merged in pairs, so
that the newest thousands of steps stay exact and the oldest become coarse. All entries take at most 2 MB. A
merged entry has the values of its last step, and the extremes. A newer round that begins at a step removes all entries
from that step on; the time of the removed steps is recorded as lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain_diagnostics.analysis.confirmed_steps import ConfirmedSteps
from megatrain_diagnostics.analysis.effective_time import Restart
from megatrain_diagnostics.analysis.step_series import middle_by_step
from megatrain_diagnostics.events.tables import Float64, Int64, StepTotals, Values

CAPACITY = 16_384
_PATIENCE_STEPS = 8
"""Values of a step may arrive before or after its sums. This many steps later the step is entered without the missing
ones."""
_MAX_BAD = 1000
_MAX_RESTARTS = 1000
_NS = 1e9

COLUMNS = (
    "first", "last", "at", "round", "loss", "loss_low", "loss_high", "grad", "grad_high",
    "step_s", "step_s_low", "step_s_high", "sum_s", "tokens", "tokens_per_s", "mfu",
)  # fmt: skip
"""`sum_s` and `tokens` are sums over all steps of an entry."""
_ROW = {name: place for place, name in enumerate(COLUMNS)}
_LOWS, _HIGHS = ("loss_low", "step_s_low"), ("loss_high", "grad_high", "step_s_high")
_SUMS = ("sum_s", "tokens")


@dataclass(frozen=True, slots=True, eq=False)
class SeriesSnapshot:
    """The series at one moment. Shapes: table [columns, entries], by step. NaN: not known, or not finite."""

    table: Float64
    bad_steps: tuple[int, ...] = ()
    """The newest thousand steps whose loss or gradient norm was not finite."""
    restarts: tuple[Restart, ...] = ()
    reached: tuple[tuple[int, int, int], ...] = ()
    """(round, first step, last step) of each round that reported steps."""

    def column(self, name: str) -> Float64:
        found: Float64 = self.table[_ROW[name]]
        return found

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def between(self, first: int | None, last: int | None) -> SeriesSnapshot:
        """Return the entries that contain any step from `first` to `last`; None: no bound."""
        chosen = np.ones(len(self), dtype=bool)
        if first is not None:
            chosen &= self.column("last") >= first
        if last is not None:
            chosen &= self.column("first") <= last
        bad = tuple(
            bad_step for bad_step in self.bad_steps if (first or 0) <= bad_step and (last is None or bad_step <= last)
        )
        return SeriesSnapshot(self.table[:, chosen], bad, self.restarts, self.reached)

    def newest(self, name: str) -> float | None:
        """Return the newest finite entry of a column; None where there is none."""
        column = self.column(name)
        known = np.flatnonzero(np.isfinite(column))
        return float(column[known[-1]]) if len(known) else None


EMPTY = SeriesSnapshot(np.zeros((len(COLUMNS), 0)))


class SeriesBuilder:
    """Builds the series. For use by one thread; snapshots can be used by any thread."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        assert capacity >= 8
        self._table: Float64 = np.full((len(COLUMNS), capacity), np.nan)
        self._size = 0
        self._round = -1
        self._next_step = 0
        self._num_needed = 1
        self._has_entered = False
        self._bad: list[int] = []
        self._restarts: list[Restart] = []
        self._reached: dict[int, tuple[int, int]] = {}

    @property
    def round(self) -> int:
        """The round that is being entered; -1: none yet."""
        return self._round

    @property
    def next_step(self) -> int:
        """The first step of the round that is not entered yet."""
        return self._next_step

    def begin(self, round_number: int, num_ranks: int, first_step: int) -> None:
        """Continue with a round that begins at a step.

        `num_ranks`: the number of ranks whose rows are used. With one rank, its rows need no confirmation by other
        ranks.
        """
        self._round, self._next_step, self._has_entered = round_number, first_step, False
        self._num_needed = min(2, num_ranks)

    def skip_to(self, step: int) -> None:
        """Assume that there are no rows before a step."""
        self._next_step = max(self._next_step, step)

    def take(self, values: Values, totals: StepTotals, *, is_last: bool = False) -> int:
        """Enter the steps that are reported so far and return their number. Rows are of the round, from next_step on.

        `is_last`: missing rows will not arrive any more.
        """
        of_values, of_totals = self._newest_confirmed(values), self._newest_confirmed(totals)
        newest = max(of_values, of_totals)
        last = newest if is_last else max(min(of_values, of_totals), newest - _PATIENCE_STEPS)
        stored = np.concatenate([values.step, totals.step]).astype(np.int64)
        steps = np.unique(stored[(stored >= self._next_step) & (stored <= last)])
        if not len(steps):
            return 0
        entries = _entries(steps, self._round, values, totals)
        if not self._has_entered:
            self._restart(int(steps[0]), float(entries[_ROW["at"], 0] - entries[_ROW["step_s"], 0]))
            self._has_entered = True
        self._append(entries)
        self._add_bad_steps(values, steps)
        self._next_step = int(steps[-1]) + 1
        first = self._reached.get(self._round, (int(steps[0]), 0))[0]
        self._reached[self._round] = (first, int(steps[-1]))
        return len(steps)

    def _newest_confirmed(self, table: Values | StepTotals) -> int:
        """Return the newest step of a table that enough ranks report; -1 for none."""
        confirmed = ConfirmedSteps(self._num_needed)
        fresh = table.step >= self._next_step
        confirmed.add(table.rank[fresh], table.step[fresh])
        return confirmed.newest

    def snapshot(self) -> SeriesSnapshot:
        """Return a copy of the series."""
        reached = tuple((number, *span) for number, span in sorted(self._reached.items()))
        return SeriesSnapshot(self._table[:, : self._size].copy(), tuple(self._bad), tuple(self._restarts), reached)

    def _restart(self, step: int, begin_s: float) -> None:
        """Remove the steps from `step` on, which a new round repeats, and record the time lost until it began."""
        if not self._size:
            return
        before = int(self._table[_ROW["round"], self._size - 1])
        kept_s = self._take_back(step)
        if np.isfinite(kept_s) and kept_s <= begin_s:
            self._restarts = [*self._restarts, Restart(before, kept_s, begin_s)][-_MAX_RESTARTS:]

    def _take_back(self, step: int) -> float:
        """Remove the steps from `step` on; return when the last step before it ended, NaN where that is not known."""
        table = self._table[:, : self._size]
        gone = np.flatnonzero(table[_ROW["last"]] >= step)
        first = int(gone[0]) if len(gone) else self._size
        kept_s = float(table[_ROW["at"], first - 1]) if first else np.nan
        if len(gone):
            begin_s = float(table[_ROW["at"], first] - table[_ROW["sum_s"], first])
            kept_s = kept_s if np.isfinite(kept_s) else begin_s
            if table[_ROW["first"], first] < step:
                kept_s = self._cut(first, step)
                first += 1
        self._size = first
        self._bad = [bad_step for bad_step in self._bad if bad_step < step]
        return kept_s

    def _cut(self, place: int, step: int) -> float:
        """Shorten an entry of several steps to those before `step`, by proportion; return their end."""
        entry = self._table[:, place]
        part = (step - entry[_ROW["first"]]) / (entry[_ROW["last"]] - entry[_ROW["first"]] + 1)
        entry[_ROW["at"]] -= entry[_ROW["sum_s"]] * (1.0 - part)
        entry[_ROW["last"]] = step - 1
        for name in _SUMS:
            entry[_ROW[name]] *= part
        return float(entry[_ROW["at"]])

    def _append(self, entries: Float64) -> None:
        capacity = self._table.shape[1]
        while entries.shape[1]:
            if self._size == capacity:
                self._put_together()
            num_free = capacity - self._size
            part, entries = entries[:, :num_free], entries[:, num_free:]
            self._table[:, self._size : self._size + part.shape[1]] = part
            self._size += part.shape[1]

    def _put_together(self) -> None:
        """Merge the entries of the older half in pairs."""
        half = self._size // 4 * 2
        older = self._table[:, :half]
        merged = put_in_bins(older, np.arange(half) // 2)
        merged = np.where(np.isfinite(merged), merged, older[:, ::2])  # the earlier value where the later is not known
        rest = self._table[:, half : self._size].copy()
        self._table[:, : half // 2] = merged
        self._table[:, half // 2 : half // 2 + rest.shape[1]] = rest
        self._size = half // 2 + rest.shape[1]

    def _add_bad_steps(self, values: Values, steps: Int64) -> None:
        is_judged = np.isin(values.kind, (StepValue.LOSS, StepValue.GRAD_NORM)) & np.isin(values.step, steps)
        for step in np.unique(values.step[is_judged & ~np.isfinite(values.value)]).tolist():
            rows = is_judged & (values.step == step)
            middles = (_middle(values.value[rows & (values.kind == kind)]) for kind in np.unique(values.kind[rows]))
            if not all(np.isfinite(middle) for middle in middles):
                self._bad = [*self._bad, int(step)][-_MAX_BAD:]


def _middle(values: Float64) -> float:
    """Return the lower median; NaN counts as the greatest value."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def _entries(steps: Int64, round_number: int, values: Values, totals: StepTotals) -> Float64:
    """Return the entries of some steps, ascending. Where several ranks report a value, the median counts."""

    def median_of(kind: StepValue) -> Float64:
        rows = values.kind == kind
        found = middle_by_step(values.step[rows].astype(np.int64), values.value[rows], steps)
        return np.where(np.isfinite(found), found, np.nan)

    at_s = middle_by_step(values.step.astype(np.int64), values.at_ns / _NS, steps)
    is_step = totals.operation == Operation.STEP.number
    seconds = middle_by_step(totals.step[is_step].astype(np.int64), totals.sum_ns[is_step] / _NS, steps)
    begin_s = middle_by_step(totals.step[is_step].astype(np.int64), totals.start_ns[is_step] / _NS, steps)
    at_s = np.where(np.isfinite(at_s), at_s, begin_s + seconds)
    since_last = np.diff(at_s, prepend=np.nan)
    is_next = np.diff(steps, prepend=steps[0]) == 1
    seconds = np.where(np.isfinite(seconds), seconds, np.where(is_next & (since_last > 0), since_last, np.nan))
    seconds = np.where(seconds > 0, seconds, np.nan)
    tokens, flops, peak = (median_of(kind) for kind in (StepValue.TOKENS, StepValue.MODEL_FLOPS, StepValue.PEAK_FLOPS))
    loss, grad = median_of(StepValue.LOSS), median_of(StepValue.GRAD_NORM)
    columns = {
        "first": steps, "last": steps, "at": at_s, "round": np.full(len(steps), round_number),
        "loss": loss, "loss_low": loss, "loss_high": loss, "grad": grad, "grad_high": grad,
        "step_s": seconds, "step_s_low": seconds, "step_s_high": seconds, "sum_s": seconds, "tokens": tokens,
        "tokens_per_s": np.where(tokens > 0, tokens, np.nan) / seconds,
        "mfu": np.where((flops > 0) & (peak > 0), flops, np.nan) / seconds / np.where(peak > 0, peak, np.nan),
    }  # fmt: skip
    return np.stack([np.asarray(columns[name], dtype=np.float64) for name in COLUMNS])


def put_in_bins(table: Float64, bins: Int64) -> Float64:
    """Return one entry for each run of equal `bins`, which ascend. Shapes: table [columns, entries], bins [entries]."""
    if not table.shape[1]:
        return table
    starts = np.flatnonzero(np.r_[True, np.diff(bins) != 0])
    ends = np.r_[starts[1:], table.shape[1]]
    found = table[:, ends - 1].copy()
    found[_ROW["first"]] = table[_ROW["first"], starts]
    for name in _LOWS:
        found[_ROW[name]] = np.fmin.reduceat(table[_ROW[name]], starts)
    for name in _HIGHS:
        found[_ROW[name]] = np.fmax.reduceat(table[_ROW[name]], starts)
    for name in _SUMS:
        is_known = np.isfinite(table[_ROW[name]])
        sums = np.add.reduceat(np.where(is_known, table[_ROW[name]], 0.0), starts)
        found[_ROW[name]] = np.where(np.logical_or.reduceat(is_known, starts), sums, np.nan)
    return found
