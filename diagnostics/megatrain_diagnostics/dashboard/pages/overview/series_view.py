"""/series: the numbers of each step as columns, no more entries than a chart has pixels, and no spike lost."""

from __future__ import annotations

import numpy as np

from megatrain_diagnostics.dashboard.pages.overview.document import SeriesDocument
from megatrain_diagnostics.dashboard.sources.series_book import SeriesSnapshot, put_in_bins
from megatrain_diagnostics.events.tables import Float64


def series_document(
    series: SeriesSnapshot, *, round_number: int | None, first: int | None, last: int | None, points: int
) -> SeriesDocument:
    """Return at most `points` entries of the steps from `first` to `last`; None: no bound, or all rounds."""
    chosen = np.ones(len(series), dtype=bool)
    if round_number is not None:
        chosen &= series.column("round") == round_number
    if first is not None:
        chosen &= series.column("last") >= first
    if last is not None:
        chosen &= series.column("first") <= last
    table = series.table[:, chosen]
    picked = SeriesSnapshot(table)
    stride = 1
    if len(picked):
        begin, end = int(picked.column("first")[0]), int(picked.column("last")[-1])
        stride = max(1, -(-(end - begin + 1) // points))
        bins = (picked.column("last").astype(np.int64) - begin) // stride
        picked = SeriesSnapshot(put_in_bins(table, bins))
        stride = max(stride, int((picked.column("last") - picked.column("first")).max()) + 1)
    steps = tuple(picked.column("last").astype(np.int64).tolist())
    return SeriesDocument(
        stride=stride,
        step=steps,
        at_unix_s=_numbers(picked.column("at")),
        loss=_numbers(picked.column("loss")),
        loss_low=_numbers(picked.column("loss_low")),
        loss_high=_numbers(picked.column("loss_high")),
        grad_norm=_numbers(picked.column("grad")),
        grad_norm_high=_numbers(picked.column("grad_high")),
        step_s=_numbers(picked.column("step_s")),
        step_s_low=_numbers(picked.column("step_s_low")),
        step_s_high=_numbers(picked.column("step_s_high")),
        tokens_per_s=_numbers(_rate(picked)),
        mfu=_numbers(picked.column("mfu")),
        round=tuple(picked.column("round").astype(np.int64).tolist()),
        bad_steps=tuple(step for step in series.bad_steps if (first or 0) <= step and (last is None or step <= last)),
    )


def _rate(series: SeriesSnapshot) -> Float64:
    """Return the tokens by the time of all steps of an entry; where one of them is not known, the last step's."""
    tokens, seconds = series.column("tokens"), series.column("sum_s")
    is_told = np.isfinite(tokens) & np.isfinite(seconds) & (seconds > 0) & (tokens > 0)
    rate: Float64 = np.where(is_told, tokens, np.nan) / np.where(is_told, seconds, 1.0)
    return np.where(is_told, rate, series.column("tokens_per_s"))


def _numbers(column: Float64) -> tuple[float | None, ...]:
    return tuple(value if known else None for value, known in zip(column.tolist(), np.isfinite(column), strict=True))
