"""Makes the document of /series: numbers of steps as columns, with a bounded number of entries. No spike is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatrain_dashboard.api.overview.document import GapDocument, RangeDocument, SeriesDocument
from megatrain_dashboard.sources.series_builder import SeriesSnapshot, put_in_bins
from megatrain_dashboard.sources.window import Window
from megatrain_diagnostics.analysis.effective_time import Restart
from megatrain_diagnostics.events.tables import Float64

_PART_FOR_GAPS = 4
"""At most one in this many entries is used for a gap."""
_MIN_PART = 500
"""A gap that is shorter than the shown time divided by this number would take less than a pixel of a chart."""


def series_document(series: SeriesSnapshot, *, round_number: int | None, window: Window, points: int) -> SeriesDocument:
    """Return at most `points` entries of `series`, which holds the steps of the window.

    `round_number`: only steps of this round; None: of all rounds.
    """
    table = series.table if round_number is None else series.table[:, series.column("round") == round_number]
    picked = SeriesSnapshot(table)
    gaps: tuple[Restart, ...] = ()
    stride = 1
    if len(picked):
        gaps = _gaps(series.restarts, picked, window, points // _PART_FOR_GAPS)
        begin, end = int(picked.column("first")[0]), int(picked.column("last")[-1])
        stride = max(1, -(-(end - begin + 1) // max(1, points - len(gaps))))
        bins = (picked.column("last").astype(np.int64) - begin) // stride
        # an entry with steps on both sides of a gap would be drawn inside the gap
        bins += np.searchsorted([gap.end_s for gap in gaps], np.nan_to_num(picked.column("at")))
        picked = SeriesSnapshot(put_in_bins(table, bins))
        stride = max(stride, int((picked.column("last") - picked.column("first")).max()) + 1)
    steps = tuple(picked.column("last").astype(np.int64).tolist())
    return SeriesDocument(
        stride=stride,
        step=steps,
        at_unix_s=numbers(picked.column("at")),
        loss=numbers(picked.column("loss")),
        loss_low=numbers(picked.column("loss_low")),
        loss_high=numbers(picked.column("loss_high")),
        grad_norm=numbers(picked.column("grad")),
        grad_norm_high=numbers(picked.column("grad_high")),
        step_s=numbers(picked.column("step_s")),
        step_s_low=numbers(picked.column("step_s_low")),
        step_s_high=numbers(picked.column("step_s_high")),
        tokens_per_s=numbers(_rate(picked)),
        mfu=numbers(picked.column("mfu")),
        round=tuple(picked.column("round").astype(np.int64).tolist()),
        bad_steps=series.bad_steps,
        gaps=tuple(GapDocument(begin_unix_s=gap.begin_s, end_unix_s=gap.end_s, round=gap.round) for gap in gaps),
        range=range_document(window),
    )


def range_document(window: Window) -> RangeDocument:
    """Return the bounds of a request, by steps and by time."""
    return RangeDocument(
        first_step=window.first_step,
        last_step=window.last_step,
        begin_unix_s=window.begin_s,
        end_unix_s=window.end_s,
    )


def _gaps(restarts: Sequence[Restart], shown: SeriesSnapshot, window: Window, most: int) -> tuple[Restart, ...]:
    """Return the longest visible gaps, in order of time. A gap is a time without a step that counts."""
    at = shown.column("at")
    known = at[np.isfinite(at)]
    if not len(known):
        return ()
    begin_s = window.begin_s if window.begin_s is not None else float(known[0])
    end_s = window.end_s if window.end_s is not None else float(known[-1])
    least_s = (end_s - begin_s) / _MIN_PART
    within = [restart for restart in restarts if restart.begin_s < end_s and restart.end_s > begin_s]
    seen = [restart for restart in within if restart.end_s - restart.begin_s >= least_s]
    longest = sorted(seen, key=lambda restart: restart.begin_s - restart.end_s)[:most]
    return tuple(sorted(longest, key=lambda restart: restart.begin_s))


def _rate(series: SeriesSnapshot) -> Float64:
    """Return the tokens of each entry divided by its time; where one of these is not known, the last step's rate."""
    tokens, seconds = series.column("tokens"), series.column("sum_s")
    is_known = np.isfinite(tokens) & np.isfinite(seconds) & (seconds > 0) & (tokens > 0)
    rate: Float64 = np.where(is_known, tokens, np.nan) / np.where(is_known, seconds, 1.0)
    return np.where(is_known, rate, series.column("tokens_per_s"))


def numbers(column: Float64) -> tuple[float | None, ...]:
    """Return the values of a column; None for those that are not finite."""
    return tuple(value if known else None for value, known in zip(column.tolist(), np.isfinite(column), strict=True))
