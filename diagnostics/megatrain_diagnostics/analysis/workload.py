"""Finds out whether own compute follows the samples: the sequence-length imbalance of OSDI'25 sec. 5.

The cost of attention grows with the sum of the squared lengths of the documents, so a rank with longer documents
computes longer on any host. Compute cannot grow by a larger fraction than this sum. If it does, the host is slow, even
if its sequences are longer too. Where the compute of the peers follows their sums, it also shows how much of the excess
the samples explain; the rest is the host's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain_diagnostics.analysis.history import ComparedSteps
from megatrain_diagnostics.analysis.own_time import Aspect
from megatrain_diagnostics.analysis.peers import MAD_TO_SIGMA
from megatrain_diagnostics.analysis.step_ring import WORK_KINDS
from megatrain_diagnostics.events.tables import Flags, Float64, Int64, Spans

MIN_WORK_CORRELATION = 0.9
"""Least Pearson correlation (OSDI'25)."""
_EXPLAINS = 0.8
"""The sum of squared lengths must exceed that of the peers by at least this fraction of the excess of compute."""
_MIN_VARIATION = 0.05
"""Least relative variation of durations. A correlation of durations that vary less is one of noise."""
_MIN_PAIRS = 8
_MIN_ON_LINE = 0.75
"""Least fraction of the pairs that must lie on one line for the rest of them to be outliers."""
_OUTLIER = 3.0
"""A pair further from the line than this many spreads is an outlier."""
_LEAST_SPREAD = 0.01
"""Least spread about the line, as a fraction of the median of compute: differences as small as that are noise."""
_NUM_FITS = 10
_CERTAIN = 3.0
"""A rank computes longer than a line predicts if it is above it by this many standard errors of the line."""

Correlation = Callable[[NDArray[np.floating], NDArray[np.floating]], float]


def pearson(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """Return the correlation of two series; 0 where one of them does not vary."""
    first, second = np.ravel(first) - np.mean(first), np.ravel(second) - np.mean(second)
    size = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum() / size) if size > 0.0 else 0.0


def robust_pearson(compute: NDArray[np.floating], work: NDArray[np.floating]) -> float:
    """Return the correlation of two series without outliers of the first; 0 where one of them does not vary.

    A rank whose core is busy for one step computes longer there, whatever its samples are. A few such steps must not
    hide that compute follows the samples in all others. Where more than a quarter of the pairs are far from a line,
    none of them counts as an outlier. The line is that of least trimmed squares (Rousseeuw 1984), found by
    concentration steps. Shapes: both [pairs].
    """
    is_near = _near_line(compute, work)
    return pearson(compute[is_near], work[is_near])


def _near_line(compute: NDArray[np.floating], work: NDArray[np.floating]) -> Flags:
    """Return the pairs that are no outliers; all of them where too many are far from a line. Shapes: all [pairs]."""
    kept = np.ones(len(compute), dtype=bool)
    distance = _distance_from_line(compute, work, kept)
    num_on_line = int(np.ceil(_MIN_ON_LINE * len(compute)))
    for _ in range(_NUM_FITS):
        nearest = np.zeros_like(kept)
        nearest[np.argsort(distance, kind="stable")[:num_on_line]] = True
        if (nearest == kept).all():
            break
        kept = nearest
        distance = _distance_from_line(compute, work, kept)
    spread = max(MAD_TO_SIGMA * float(np.median(distance)), _LEAST_SPREAD * float(np.median(compute)))
    is_near: Flags = distance <= _OUTLIER * spread
    return is_near if is_near.sum() >= num_on_line else np.ones_like(kept)


def _distance_from_line(compute: NDArray[np.floating], work: NDArray[np.floating], kept: Flags) -> Float64:
    """Return how far each pair's compute is from the line of least squares through the kept pairs. Shapes: [pairs]."""
    middle, spread = float(np.mean(work[kept])), float(np.var(work[kept]))
    covariance = float(np.mean((work[kept] - middle) * compute[kept]))
    slope = covariance / spread if spread > 0.0 else 0.0
    found: Float64 = np.abs(compute - np.mean(compute[kept]) - slope * (work - middle))
    return found


def work_correlation(window: ComparedSteps, ranks: Int64, correlation: Correlation) -> float:
    """Return the highest correlation, over steps and ranks, of compute with a kind of these ranks' work; at least 0."""
    compute = window.own[:, Aspect.COMPUTE][:, ranks]
    has_reported = window.has_reported[:, ranks]
    found = [0.0]
    for kind in range(window.work.shape[1]):
        work = window.work[:, kind][:, ranks]
        known = has_reported & (work > 0.0)
        if known.sum() >= _MIN_PAIRS:
            found.append(correlation(compute[known], work[known]))
    return max(found)


def work_excess(window: ComparedSteps, rank: int, peers: Int64) -> float:
    """Return by which fraction a rank's work exceeds that of its peers; 0 if it does not, or no work is known."""
    found = 0.0
    for kind in range(window.work.shape[1]):
        if not len(peers):
            continue
        own, others = window.work[:, kind, rank], np.median(window.work[:, kind][:, peers], axis=1)
        known = (own > 0.0) & (others > 0.0)
        if known.any():
            found = max(found, float(np.median(own[known] / others[known])) - 1.0)
    return found


def is_explained(window: ComparedSteps, rank: int, peers: Int64, excess: float) -> bool:
    """Return whether a rank's samples explain the excess of its compute."""
    compared = np.append(peers, rank)
    return (
        work_excess(window, rank, peers) >= _EXPLAINS * excess
        and work_correlation(window, compared, robust_pearson) >= MIN_WORK_CORRELATION
    )


def unexplained_s(window: ComparedSteps, rank: int, peers: Int64) -> float:
    """Return by how many seconds a step a rank certainly computes longer than its samples explain; at least 0.

    The least-squares line through the peers' compute and squared lengths gives the cost of the rank's own squared
    lengths. The result is 0 if the peers' compute does not follow them.
    """
    kind = WORK_KINDS.index(StepValue.SQUARED_LENGTHS)
    work, compute = window.work[:, kind], window.own[:, Aspect.COMPUTE].astype(np.float64)
    is_known = window.has_reported & (work > 0.0)
    of_peers, own = is_known[:, peers], is_known[:, rank]
    if of_peers.sum() < _MIN_PAIRS or not own.any():
        return 0.0
    x, y = work[:, peers][of_peers], compute[:, peers][of_peers]
    is_near = _near_line(y, x)
    x, y = x[is_near], y[is_near]
    if pearson(y, x) < MIN_WORK_CORRELATION:
        return 0.0
    middle, spread = float(x.mean()), float(((x - x.mean()) ** 2).sum())
    slope = float(((x - middle) * y).sum()) / spread
    rest = y - y.mean() - slope * (x - middle)
    variance = float((rest**2).sum()) / (len(x) - 2)
    above = compute[own, rank] - y.mean() - slope * (work[own, rank] - middle)
    far = float(np.median(work[own, rank])) - middle
    error = math.sqrt(variance * (1.0 / len(x) + far**2 / spread))
    return max(0.0, float(np.median(above)) - _CERTAIN * error)


def pass_correlations(spans: Spans, num_ranks: int) -> Float64:
    """Return for each rank the correlation of forward and backward of the same micro-batch; 0 with too little data.

    A long sequence makes both passes long, but the slowness of a host changes between them. The mean of each chunk and
    step is subtracted first, so that a step that was slow as a whole does not count. Shapes: [ranks].
    """
    found = np.zeros(num_ranks)
    pairs = _passes(spans)
    for rank in np.unique(pairs[:, 0]).astype(np.int64).tolist():
        own = pairs[pairs[:, 0] == rank]
        if not 0 <= rank < num_ranks or len(own) < _MIN_PAIRS:
            continue
        _, part = np.unique(own[:, 1:3], axis=0, return_inverse=True)
        part = part.reshape(-1)
        times = own[:, 3:5]
        sums = np.stack([np.bincount(part, times[:, column]) for column in (0, 1)], axis=1)
        means = sums / np.bincount(part)[:, None]
        rest = times - means[part]
        if (rest.std(axis=0) >= _MIN_VARIATION * times.mean(axis=0)).all():
            found[rank] = pearson(rest[:, 0], rest[:, 1])
    return found


def _passes(spans: Spans) -> Float64:
    """Return a row (rank, step, chunk, forward ns, backward ns) for each micro-batch whose two durations are known."""
    by_key: list[dict[tuple[int, int, int, int], int]] = []
    for operation in (Operation.FORWARD_COMPUTE, Operation.BACKWARD_COMPUTE):
        rows = np.flatnonzero((spans.operation == operation.number) & (spans.duration_ns >= 0))
        keys = np.stack([spans.rank[rows], spans.step[rows], spans.chunk[rows], spans.microbatch[rows]], axis=1)
        by_key.append(dict(zip(map(tuple, keys.tolist()), spans.duration_ns[rows].tolist(), strict=True)))
    forward, backward = by_key
    found = [
        (rank, step, chunk, forward[rank, step, chunk, micro], duration)
        for (rank, step, chunk, micro), duration in backward.items()
        if (rank, step, chunk, micro) in forward
    ]
    return np.array(found, dtype=np.float64).reshape(-1, 5)
