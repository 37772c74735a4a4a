"""Makes the document of /sources: the training loss by source of the data. Pure functions: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatrain_dashboard.api.overview.document import SourceDocument, SourcesDocument, SourceSeriesDocument
from megatrain_dashboard.api.overview.series_view import numbers, range_document
from megatrain_dashboard.sources.runs.metrics_records import MetricsRecords
from megatrain_dashboard.sources.runs.source_losses import SourceLosses, source_losses
from megatrain_dashboard.sources.window import Window
from megatrain_diagnostics.events.tables import Int64

_LINE_POINTS = 32
"""Limit of the points of `SourceDocument.line`."""
_TENTHS = 10
"""Parts of the window: `loss` is the mean of the last part, `change` its difference from the first part."""


def sources_document(read: MetricsRecords, *, window: Window, name: str = "", points: int) -> SourcesDocument:
    """Return the losses in the window, and the series of the source `name`, of at most `points` entries.

    Without `name`, or with an unknown one, the series is that of the source whose loss rose most or fell least.
    """
    found = source_losses(read.records, window.first_step, window.last_step)
    sources = _sources(found)
    stride, bins = _bins(found.steps, points)
    means, highest = found.means(bins), found.highest(bins)
    ends = np.flatnonzero(np.diff(bins, append=bins[-1] + 1)) if len(bins) else np.zeros(0, dtype=np.int64)
    row = found.names.index(name) if name in found.names else _most_risen(sources)
    return SourcesDocument(
        sources=sources,
        stride=stride,
        step=tuple(found.steps[ends].tolist()),
        at_unix_s=numbers(found.at_s[ends]),
        series=None
        if row is None
        else SourceSeriesDocument(name=found.names[row], loss=numbers(means[row]), loss_high=numbers(highest[row])),
        is_sampled=read.is_sampled,
        range=range_document(window),
    )


def _sources(found: SourceLosses) -> tuple[SourceDocument, ...]:
    if not len(found.steps):
        return ()
    tenths = found.means(_bins(found.steps, _TENTHS)[1])
    lines = found.means(_bins(found.steps, _LINE_POINTS)[1])
    tokens = found.tokens.sum(axis=1)
    is_bad = (found.tokens > 0) & ~np.isfinite(found.losses)
    change = tenths[:, -1] - tenths[:, 0] if len(found.steps) >= _TENTHS else np.full(len(found.names), np.nan)
    newest, change_of = numbers(tenths[:, -1]), numbers(change)
    return tuple(
        SourceDocument(
            name=name,
            num_tokens=int(tokens[row]),
            token_share=float(tokens[row] / max(1.0, tokens.sum())),
            loss=newest[row],
            change=change_of[row],
            num_bad_steps=int(is_bad[row].sum()),
            last_bad_step=int(found.steps[is_bad[row]][-1]) if is_bad[row].any() else None,
            line=numbers(lines[row]),
        )
        for row, name in enumerate(found.names)
    )


def _bins(steps: Int64, most: int) -> tuple[int, Int64]:
    """Return the number of steps of a bin, and the bin of each step, so that there are at most `most` bins."""
    if not len(steps):
        return 1, np.zeros(0, dtype=np.int64)
    stride = max(1, -(-int(steps[-1] - steps[0] + 1) // most))
    # steps that were not read leave no empty bin
    bins: Int64 = np.unique((steps - steps[0]) // stride, return_inverse=True)[1].astype(np.int64)
    return stride, bins


def _most_risen(sources: Sequence[SourceDocument]) -> int | None:
    """Return the row of the source whose loss rose most or fell least; None if there is no source."""

    def rise(row: int) -> float:
        change = sources[row].change
        return -np.inf if change is None else change

    return max(range(len(sources)), key=rise, default=None)
