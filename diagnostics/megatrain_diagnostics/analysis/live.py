"""Live detection: who is slow, step by step, from the sums that all ranks stream.

Each step is compared once, when it is complete; only the newest steps are kept, so that a step costs the same on the
first day as on the thirtieth. Whoever looks at a finished job feeds the same class with what the store holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from megatrain_diagnostics.analysis.candidates import candidates, least_score
from megatrain_diagnostics.analysis.findings import Assessment, Thresholds
from megatrain_diagnostics.analysis.history import DP_TRANSFERS, TP_TRANSFERS, History, Window
from megatrain_diagnostics.analysis.own_time import Aspect, is_only_training
from megatrain_diagnostics.analysis.peers import Floats, Indices, Peers
from megatrain_diagnostics.analysis.scores import host_scores, rank_scores
from megatrain_diagnostics.analysis.step_ring import StepRing, StepRow
from megatrain_diagnostics.analysis.stragglers import Evidence, find_stragglers
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import StepTotals, Values

NUM_WARM_UP = 2
"""First steps of a round, which compile, warm up and fill caches."""
_HISTORY_STEPS = 64
_REMEMBERED_BREAKS = 16
_RECHECK_STEPS = 4
"""Without a suspect everything is looked at each so many steps."""
_ALL = 1 << 31


class LiveDetection:
    """The ranks of one round."""

    def __init__(self, roster: Roster, thresholds: Thresholds, deadline_s: float = 30.0) -> None:
        self.roster = roster
        self.thresholds = thresholds
        self.deadline_s = deadline_s
        self.ring = StepRing(roster.layout.world_size)
        self.peers = Peers(roster)
        self.step: int | None = None
        """The newest that was compared."""
        self.assessment = Assessment()
        self.num_left_out = 0
        self.num_compared = 0
        self.correlations: Floats | None = None
        """From whole spans, if anybody has looked: see workload.pass_correlations."""
        num_first = 2 * thresholds.num_steps
        self._history = History(roster.layout, max(_HISTORY_STEPS, 4 * thresholds.num_steps), num_first)
        self._num_taken = 0
        self._breaks: deque[bool] = deque(maxlen=_REMEMBERED_BREAKS)

    def set_roster(self, roster: Roster) -> None:
        """Take what has become known of hosts. The layout must be the same."""
        assert roster.layout == self.roster.layout
        self.roster, self.peers = roster, Peers(roster)

    def add_totals(self, totals: StepTotals, now_s: float) -> None:
        """Enter rows of this round. Units: `now_s` on the clock that `advance` gets."""
        self.ring.add_totals(totals, now_s)

    @property
    def farthest_step(self) -> int:
        """The last step that a rank may tell of now; what is beyond is nonsense of that rank."""
        return self.ring.farthest_step

    def add_values(self, values: Values) -> None:
        """Enter rows of this round."""
        self.ring.add_values(values)

    def advance(self, now_s: float, at_most: int = _ALL) -> int:
        """Judge the steps that are due and return how many there were."""
        count = 0
        while count < at_most and (step := self.ring.due(now_s, self.deadline_s)) is not None:
            self._judge(self.ring.take(step))
            count += 1
        return count

    def silent_ranks(self) -> tuple[int, ...]:
        """Return the ranks that have sent nothing of the newest steps, as many as a straggler must last."""
        if self.ring.next_step is None:
            return ()
        is_silent = self.ring.newest < self.ring.next_step - self.thresholds.num_steps
        is_silent |= (self.ring.newest < 0) & (self._num_taken > 0)
        is_silent |= self.ring.newest > self.ring.farthest_step
        found: Indices = np.flatnonzero(is_silent)
        return tuple(found.tolist())

    def _judge(self, row: StepRow) -> None:
        self._num_taken += 1
        if not row.has_come.any():
            return
        is_break = not is_only_training(row)
        self._breaks.append(is_break)
        # where every other step saves, those are the steps of this job
        is_usual = sum(self._breaks) > len(self._breaks) // 2 and len(self._breaks) == _REMEMBERED_BREAKS
        if self._num_taken <= NUM_WARM_UP or (is_break and not is_usual):
            self.num_left_out += 1
            return
        self.step = row.step
        self.num_compared += 1
        self._history.add(row, self.peers)
        window = self._history.window(self.thresholds.num_steps)
        is_due = self.num_compared % _RECHECK_STEPS == 0
        if is_due or self.assessment.findings or _is_suspicious(window, self.thresholds):
            self.assess()

    def assess(self) -> None:
        """Look at the newest steps thoroughly. `advance` has it done where that may say something new."""
        if not len(self._history):
            return
        window = self._history.window(2 * self.thresholds.num_steps)
        newest = window.last(self.thresholds.num_steps)
        compute = candidates(newest, Aspect.COMPUTE, self.peers, self.thresholds)
        evidence = Evidence(
            window=newest,
            compute=compute,
            long_window=window,
            history=self._history,
            past=self._history.past,
            peers=self.peers,
            roster=self.roster,
            thresholds=self.thresholds,
            bytes_of={"data-parallel": self._bytes_of(DP_TRANSFERS), "tensor-parallel": self._bytes_of(TP_TRANSFERS)},
            correlations=self.correlations,
        )
        findings = find_stragglers(evidence)
        scores = rank_scores(compute, findings) if evidence.is_enough else ()
        self.assessment = Assessment(
            findings=findings,
            unjudged_ranks=tuple(np.flatnonzero(self.peers.num_peers == 0).tolist()),
            silent_ranks=self.silent_ranks(),
            first_step=int(window.steps[0]),
            last_step=int(window.steps[-1]),
            num_steps=len(window.steps),
            num_left_out=self.num_left_out,
            is_enough=len(window.steps) >= self.thresholds.num_steps and bool((self.peers.num_peers > 0).all()),
            thresholds=replace(self.thresholds, score=least_score(self.thresholds, self.peers.num_ranks)),
            scores=scores,
            host_scores=host_scores(scores, findings, self.roster.host_of),
        )

    def _bytes_of(self, numbers: tuple[int, ...]) -> Floats:
        known = self.ring.operations
        chosen = [known.index(number) for number in numbers if number in known]
        found: Floats = self.ring.bytes_of[chosen].sum(axis=0)
        return found


def _is_suspicious(window: Window, thresholds: Thresholds) -> bool:
    """Return whether a rank was slow in some of the newest steps: a cheap look before a thorough one."""
    least = thresholds.excess * window.scale
    for aspect in (Aspect.COMPUTE, Aspect.DATA, Aspect.GC):
        seen = (window.excess[:, aspect] >= least).sum(axis=0)
        if (seen >= max(2, len(window.steps) // 2)).any():
            return True
    return False
