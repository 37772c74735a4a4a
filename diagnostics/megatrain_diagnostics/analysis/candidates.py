"""Finds the ranks that compute, wait for data or collect garbage longer than their peers over a window of steps.

A rank whose compute is slow is slow in most steps, so the median over the window is used. Waiting for data and garbage
collection occur only in some steps, so their mean is used. The score is the excess divided by the spread of the peers
or by the uncertainty of the rank's own median, whichever is larger, but at least by 1 % of the compute. The threshold
of 10 % comes from Greyhound. megatrain defines the score, and compares a rank only with peers that do the same work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain_diagnostics.analysis.findings import Thresholds
from megatrain_diagnostics.analysis.history import ComparedSteps, Trace
from megatrain_diagnostics.analysis.medians import medians
from megatrain_diagnostics.analysis.own_time import Aspect
from megatrain_diagnostics.analysis.peers import MAD_TO_SIGMA, Peers
from megatrain_diagnostics.events.tables import Flags, Float64, Int64

_FLOOR = 0.01
"""Least spread of peers, as a fraction of a stage's compute."""
_MEDIAN_ERROR = 1.2533
"""Ratio of the standard error of a median to that of a mean."""
MIN_PART_STEADY = 0.625
"""The compute of a rank is slow only if it exceeds the threshold in at least this fraction of the steps: 5 of 8."""
_MIN_PART_NOW_AND_THEN = 0.125
"""The same fraction for waiting for data and for garbage collection."""
_NUM_ONSET_STEPS = 4
"""Number of steps at the start of a period of slow compute; all of them except one must be slow."""
_MIN_CULPRIT_DEFICIT = 0.4
"""A slow rank that waits less than its peers, by at least this fraction of its excess, is confirmed as a culprit."""
_MAX_VICTIM_DEFICIT = -0.25
"""A rank that waits longer than its peers by a quarter of its excess is a victim. Negative, because the deficit is how
much less a rank waits."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """One aspect of all ranks over a window of steps. Shapes: all [ranks]. Units: `_s` is seconds per step."""

    aspect: Aspect
    excess_s: Float64
    """The additional time of the rank, compared with its peers; negative: it takes less."""
    scale_s: Float64
    """Typical compute time of the rank's stage, or else of the step; positive. Thresholds are fractions of it."""
    score: Float64
    """The excess divided by its noise, without unit; negative if the excess is negative."""
    deficit_s: Float64
    """The time by which the rank waits less than its peers; negative: it waits longer."""
    num_peers: Int64
    """Number of ranks that each rank is compared with."""
    is_slow: Flags

    @property
    def ranks(self) -> Int64:
        """Return the slow ranks, the worst first."""
        found = np.flatnonzero(self.is_slow)
        return found[np.argsort(-self.excess_s[found] / self.scale_s[found], kind="stable")]

    def agrees(self, rank: int) -> bool:
        """Return whether the second signal agrees: the rank waits less than its peers, because others wait for it."""
        return bool(self.deficit_s[rank] >= _MIN_CULPRIT_DEFICIT * self.excess_s[rank])


def candidates(window: ComparedSteps, aspect: Aspect, peers: Peers, thresholds: Thresholds) -> Candidates:
    """Compare each rank with its peers in this aspect, and mark the slow ranks."""
    is_steady = aspect is Aspect.COMPUTE
    excess = window.excess[:, aspect].astype(np.float64)
    scale = medians(window.scale, axis=0).astype(np.float64)
    count = len(window.steps)
    if is_steady:
        middle = medians(excess, axis=0).astype(np.float64)
        deficit = -medians(window.excess[:, Aspect.WAIT], axis=0)
        error = _MEDIAN_ERROR * MAD_TO_SIGMA * medians(np.abs(excess - middle), axis=0) / np.sqrt(count)
    else:
        middle, deficit = excess.mean(axis=0), -window.excess[:, Aspect.WAIT].mean(axis=0)
        error = np.zeros_like(middle)
    typical = medians(window.own[:, aspect], axis=0)[None].astype(np.float64)
    reference = peers.reference(typical, window.any_reported)
    noise = np.maximum(np.maximum(reference.spread[0], error), _FLOOR * scale)
    num_seen = (excess >= thresholds.excess * scale).sum(axis=0)
    score = middle / noise
    is_slow = (middle >= thresholds.excess * scale) & (score >= least_score(thresholds, peers.num_ranks))
    is_slow &= num_seen >= max(2.0, count * (MIN_PART_STEADY if is_steady else _MIN_PART_NOW_AND_THEN))
    is_slow &= (reference.num_peers > 0) & (deficit > _MAX_VICTIM_DEFICIT * middle)
    return Candidates(aspect, middle, scale, score, deficit.astype(np.float64), reference.num_peers, is_slow)


def least_score(thresholds: Thresholds, num_ranks: int) -> float:
    """Return the lowest score of a slow rank: above the likely maximum of `num_ranks` normally distributed scores."""
    return max(thresholds.score, float(np.sqrt(2.0 * np.log(max(num_ranks, 1)))) + 1.0)


def first_seen(trace: Trace, aspect: Aspect, thresholds: Thresholds) -> tuple[int, int, int]:
    """Return the first step of a slow period, the number of compared steps from it on, and how many of these are slow.

    It is the earliest slow step from which on a sufficient fraction of the steps is slow (five eighths for compute, one
    eighth otherwise). For compute, all but one of the first four steps must be slow too. If there is no such step, it
    is the last step.
    """
    is_seen = trace.excess >= thresholds.excess * trace.scale
    lasting = np.cumsum(is_seen[::-1])
    lengths = np.arange(1, len(is_seen) + 1)
    share = MIN_PART_STEADY if aspect is Aspect.COMPUTE else _MIN_PART_NOW_AND_THEN
    may_begin = is_seen[::-1] & (lasting >= share * lengths)
    if aspect is Aspect.COMPUTE:
        before = np.concatenate([np.zeros(_NUM_ONSET_STEPS, dtype=lasting.dtype), lasting[:-_NUM_ONSET_STEPS]])[
            : len(lasting)
        ]
        may_begin &= lasting - before >= np.minimum(lengths, _NUM_ONSET_STEPS - 1)
    begins = np.flatnonzero(may_begin)
    if not len(begins):
        return int(trace.steps[-1]), 1, int(is_seen[-1])
    length = int(begins[-1]) + 1
    return int(trace.steps[-length]), length, int(lasting[length - 1])
