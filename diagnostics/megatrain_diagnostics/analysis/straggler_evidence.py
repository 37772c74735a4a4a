"""The input of the search for stragglers: the newest steps, those before them, and the first of the round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain_diagnostics.analysis.candidates import Candidates
from megatrain_diagnostics.analysis.findings import Thresholds
from megatrain_diagnostics.analysis.history import ComparedSteps, StepHistory
from megatrain_diagnostics.analysis.own_time import Aspect
from megatrain_diagnostics.analysis.peers import Peers
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Float64, Int64

_MOST = 0.5
"""The waits of reads for pictures are the cause if they are at least this fraction of the reads, and of a rank's excess
of waiting for data."""


@dataclass(frozen=True, slots=True)
class PictureWait:
    """The reads of a host's data loader and their waits for pictures. Units: seconds per step, summed over replicas."""

    host: str
    waited_s: float
    read_s: float
    """0: not recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class StragglerEvidence:
    """The input of the findings."""

    window: ComparedSteps
    """The newest `Thresholds.num_steps` compared steps."""
    long_window: ComparedSteps
    """The newest steps, twice as many: for slowness that occurs only in some steps."""
    history: StepHistory
    """All kept steps: they show when a rank became slow."""
    past: ComparedSteps
    """The first steps of the round; empty if they are not known."""
    peers: Peers
    roster: Roster
    thresholds: Thresholds
    compute: Candidates
    """Candidates by own compute, in `window`."""
    bytes_of: dict[str, Float64]
    """Kind of group -> bytes of each rank per step."""
    explained_at: Int64
    """The newest step at which each rank's samples explained its slowness; below 0: never. Shapes: [ranks]."""
    correlations: Float64
    """From whole spans: the correlation of forward and backward of a micro-batch. Shapes: [ranks]."""

    @property
    def is_enough(self) -> bool:
        """Whether `window` has at least half of `Thresholds.num_steps` steps, and at least two."""
        return len(self.window.steps) >= max(2, self.thresholds.num_steps // 2)

    def was_explained(self, rank: int) -> bool:
        """Return whether a rank's samples explained its slowness at any step of the window."""
        return bool(self.explained_at[rank] >= self.window.steps[0])

    def has_risen_alone(self, rank: int) -> bool:
        """Return whether a rank became slower than it was, while its peers did not."""
        if not len(self.past.steps):
            return False
        now, before = self._now_and_before()
        least = self.thresholds.excess
        others = np.flatnonzero((self.peers.stage_of == self.peers.stage_of[rank]) & (before > 0.0))
        others = others[others != rank]
        if before[rank] <= 0.0 or not len(others):
            return False
        rise = float(np.median(now[others] / before[others])) - 1.0
        return bool(now[rank] / before[rank] - 1.0 >= least and rise < least / 2)

    def has_stage_risen(self, stage: int) -> bool:
        """Return whether a stage became slower than it was at first: the partition of the model cannot cause that."""
        if not len(self.past.steps):
            return False
        ranks = self.peers.stage_of == stage
        now, before = self._now_and_before()
        if not (before > 0.0).all():
            return False
        rise = now / before - 1.0
        least = self.thresholds.excess
        return bool(np.median(rise[ranks]) >= least and np.median(rise[~ranks]) < least / 2)

    def picture_wait(self, host: str, excess_s: float) -> PictureWait | None:
        """Return the wait for producers of pictures that makes the ranks of a host wait for data.

        excess_s: how much longer than its peers a rank waits for data. None: it has another cause.
        """
        ranks = list(self.roster.ranks_on(host))
        read_s, waited_s = self.long_window.reads_s[:, :, ranks].sum(axis=-1).mean(axis=0).tolist()
        is_cause = waited_s >= _MOST * max(read_s, excess_s)
        return PictureWait(host, waited_s, read_s) if waited_s > 0.0 and is_cause else None

    def exposed_s(self) -> float:
        """Return by how many seconds steps became longer; if that is not known, their whole duration."""
        now_s = float(np.median(self.window.step_s))
        return max(0.0, now_s - float(np.median(self.past.step_s))) if len(self.past.steps) else now_s

    def _now_and_before(self) -> tuple[Float64, Float64]:
        """Return the median own compute of each rank in the window and in the first steps. Shapes: [ranks]."""
        now, before = (compared.own[:, Aspect.COMPUTE].astype(np.float64) for compared in (self.window, self.past))
        return np.median(now, axis=0), np.median(before, axis=0)
