"""Which ranks take longer than their peers, by aspect: robust scores over a window of steps, with persistence.

Two kinds of slowness differ in time. Own compute is slow in most steps: its median over the window is judged. Waiting
for data and garbage collection come now and then and hurt when they do: their mean is judged. The score divides by the
spread of the peers and by the uncertainty of the rank's own median, whichever is more (ours, after Greyhound's check of
10 % and the peer classes that fault-tolerant trainers lack).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain_diagnostics.analysis.findings import Thresholds
from megatrain_diagnostics.analysis.history import Trace, Window
from megatrain_diagnostics.analysis.own_time import Aspect
from megatrain_diagnostics.analysis.peers import MAD_TO_SIGMA, Flags, Floats, Indices, Peers

_FLOOR = 0.01
"""Of what a stage computes: peers are never taken to agree better than this."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median, of that of a mean."""
_MOST = 0.625
"""In so many of the steps a slow rank is seen to be slow: 5 of 8."""
_SOME = 0.125
_BEGINNING = 4
"""Of the first so many steps of a slowness all but one show it."""
_AGREES = 0.4
"""Of its excess a culprit waits at least this part less than its peers do."""
_CONTRADICTS = -0.25
"""Who waits so much longer than its peers is a victim, whatever else it does."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """One aspect of all ranks. Shapes: all [ranks]. Units: seconds a step."""

    aspect: Aspect
    excess_s: Floats
    scale_s: Floats
    score: Floats
    deficit_s: Floats
    """Waits so much less than the peers."""
    num_seen: Indices
    num_peers: Indices
    is_slow: Flags

    @property
    def ranks(self) -> Indices:
        """Return the slow ones, the worst first."""
        found = np.flatnonzero(self.is_slow)
        return found[np.argsort(-self.excess_s[found] / self.scale_s[found], kind="stable")]

    def agrees(self, rank: int) -> bool:
        """Return whether the second signal says the same: others wait for this rank."""
        return bool(self.deficit_s[rank] >= _AGREES * self.excess_s[rank])


def candidates(window: Window, aspect: Aspect, peers: Peers, thresholds: Thresholds) -> Candidates:
    """Return how far each rank is from its peers in this aspect, and who is slow."""
    is_steady = aspect is Aspect.COMPUTE
    excess = window.excess[:, aspect].astype(np.float64)
    scale = np.median(window.scale, axis=0).astype(np.float64)
    count = len(window.steps)
    if is_steady:
        middle, deficit = np.median(excess, axis=0), -np.median(window.excess[:, Aspect.WAIT], axis=0)
        error = _MEDIAN_ERROR * MAD_TO_SIGMA * np.median(np.abs(excess - middle), axis=0) / np.sqrt(count)
    else:
        middle, deficit = excess.mean(axis=0), -window.excess[:, Aspect.WAIT].mean(axis=0)
        error = np.zeros_like(middle)
    typical = np.median(window.own[:, aspect], axis=0)[None].astype(np.float64)
    reference = peers.reference(typical, window.anybody_came)
    noise = np.maximum(np.maximum(reference.spread[0], error), _FLOOR * scale)
    num_seen = (excess >= thresholds.excess * scale).sum(axis=0)
    score = middle / noise
    is_slow = (middle >= thresholds.excess * scale) & (score >= least_score(thresholds, peers.num_ranks))
    is_slow &= num_seen >= max(2.0, count * (_MOST if is_steady else _SOME))
    is_slow &= (reference.num_peers > 0) & (deficit > _CONTRADICTS * middle)
    return Candidates(aspect, middle, scale, score, deficit.astype(np.float64), num_seen, reference.num_peers, is_slow)


def least_score(thresholds: Thresholds, num_ranks: int) -> float:
    """Return the score that chance alone does not reach with so many ranks to look at (the greatest of n normals)."""
    return max(thresholds.score, float(np.sqrt(2.0 * np.log(max(num_ranks, 1)))) + 1.0)


def first_seen(trace: Trace, aspect: Aspect, thresholds: Thresholds) -> tuple[int, int, int]:
    """Return since which step a rank is slow, the steps compared since then, and in how many of these it was seen.

    Going back, the beginning is the earliest slow step from which on most steps are, the next few among them.
    """
    is_seen = trace.excess >= thresholds.excess * trace.scale
    lasting = np.cumsum(is_seen[::-1])
    lengths = np.arange(1, len(is_seen) + 1)
    share = _MOST if aspect is Aspect.COMPUTE else _SOME
    may_begin = is_seen[::-1] & (lasting >= share * lengths)
    if aspect is Aspect.COMPUTE:
        before = np.concatenate([np.zeros(_BEGINNING, dtype=lasting.dtype), lasting[:-_BEGINNING]])[: len(lasting)]
        may_begin &= lasting - before >= np.minimum(lengths, _BEGINNING - 1)
    begins = np.flatnonzero(may_begin)
    if not len(begins):
        return int(trace.steps[-1]), 1, int(is_seen[-1])
    length = int(begins[-1]) + 1
    return int(trace.steps[-length]), length, int(lasting[length - 1])
