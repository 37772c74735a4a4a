"""Detects slow ranks while a job runs, step by step, from the sums that all ranks stream.

Each step is compared once, when it is complete. Only the newest steps are kept, so that a step costs the same on the
first day as on the thirtieth. An analysis of a finished job feeds the same class with stored events.

The straggler score is one number per rank and per host, the same on the page, in metrics, verdicts and commands. A
rank's score is how far its own compute is above its peers over the newest compared steps, in spreads (`candidates`).
If a finding names the rank, for instance because of its garbage collection, and has a greater score, the score of the
finding is used. A host's score is the greatest score of its ranks, or of the ranks that a finding names. Findings about
waits for data do not count, because the host is not slow. No score is below 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatrain.contracts.black_box.operations import REPLICA_COLLECTIVES, TP_COLLECTIVES, Operation
from megatrain.contracts.records.host_verdict import Cause
from megatrain_diagnostics.analysis.candidates import Candidates, candidates, least_score
from megatrain_diagnostics.analysis.findings import Finding, StragglerAssessment, Thresholds, greatest_by_host
from megatrain_diagnostics.analysis.history import ComparedSteps, StepHistory
from megatrain_diagnostics.analysis.own_time import Aspect, is_only_training
from megatrain_diagnostics.analysis.peers import Peers
from megatrain_diagnostics.analysis.step_ring import StepRing, StepRow, rows_of
from megatrain_diagnostics.analysis.straggler_evidence import StragglerEvidence
from megatrain_diagnostics.analysis.stragglers import find_stragglers
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Float64, Int64, StepTotals, Values

_NUM_FIRST_STEPS = 2
"""The first steps of a round compile and fill caches, so this many are left out. Ranks are compared within a step here,
so a delay common to all of them does no harm. The drift analysis compares steps with each other, and leaves out one
step more."""
_HISTORY_STEPS = 64
_REMEMBERED_STEPS = 16
_RECHECK_STEPS = 4
"""Without a suspect the thorough check runs once in this many steps."""
_ALL = 1 << 31


class LiveDetection:
    """Detection of stragglers among the ranks of one round."""

    def __init__(self, roster: Roster, thresholds: Thresholds, deadline_s: float = 30.0) -> None:
        self.roster = roster
        self.thresholds = thresholds
        self.deadline_s = deadline_s
        self.ring = StepRing(roster.layout.world_size)
        self.peers = Peers(roster)
        self.step: int | None = None
        """Newest compared step."""
        self.assessment = StragglerAssessment()
        self.num_left_out = 0
        self.num_compared = 0
        self.correlations = np.zeros(roster.layout.world_size)
        """Result of workload.pass_correlations, from whole spans; zeros if they were not read."""
        num_first = 2 * thresholds.num_steps
        self._history = StepHistory(roster.layout, max(_HISTORY_STEPS, 4 * thresholds.num_steps), num_first)
        self._num_taken = 0
        self._explained_at = np.full(roster.layout.world_size, -1, dtype=np.int64)
        self._had_other_work: deque[bool] = deque(maxlen=_REMEMBERED_STEPS)

    def set_roster(self, roster: Roster) -> None:
        """Take the roster with more known hosts. The layout must be the same."""
        assert roster.layout == self.roster.layout
        self.roster, self.peers = roster, Peers(roster)

    def add_totals(self, totals: StepTotals, now_s: float) -> None:
        """Enter rows of this round. Units: `now_s` on the clock of `advance`."""
        self.ring.add_totals(totals, now_s)

    @property
    def farthest_step(self) -> int:
        """The last step that a rank may report now; a later step is an error of that rank."""
        return self.ring.farthest_step

    def add_values(self, values: Values) -> None:
        """Enter rows of this round."""
        self.ring.add_values(values)

    def advance(self, now_s: float, at_most: int = _ALL) -> int:
        """Judge the steps that are due and return their number."""
        count = 0
        while count < at_most and (step := self.ring.due(now_s, self.deadline_s)) is not None:
            self._compare_step(self.ring.take(step))
            count += 1
        return count

    def silent_ranks(self) -> tuple[int, ...]:
        """Return ranks without events in the newest `thresholds.num_steps` steps, or with an impossible newest step."""
        if self.ring.next_step is None:
            return ()
        is_silent = self.ring.newest < self.ring.next_step - self.thresholds.num_steps
        is_silent |= (self.ring.newest < 0) & (self._num_taken > 0)
        is_silent |= self.ring.newest > self.ring.farthest_step
        found: Int64 = np.flatnonzero(is_silent)
        return tuple(found.tolist())

    def _compare_step(self, row: StepRow) -> None:
        self._num_taken += 1
        if not row.has_reported.any():
            return
        has_other_work = not is_only_training(row)
        self._had_other_work.append(has_other_work)
        # where most steps of a job save or evaluate, such steps are its normal ones
        is_usual = (
            sum(self._had_other_work) > len(self._had_other_work) // 2
            and len(self._had_other_work) == _REMEMBERED_STEPS
        )
        if self._num_taken <= _NUM_FIRST_STEPS or (has_other_work and not is_usual):
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
        """Check the newest steps thoroughly. `advance` calls this when it may give a new result."""
        if not len(self._history):
            return
        window = self._history.window(2 * self.thresholds.num_steps)
        newest = window.last(self.thresholds.num_steps)
        compute = candidates(newest, Aspect.COMPUTE, self.peers, self.thresholds)
        evidence = StragglerEvidence(
            window=newest,
            compute=compute,
            long_window=window,
            history=self._history,
            past=self._history.past,
            peers=self.peers,
            roster=self.roster,
            thresholds=self.thresholds,
            bytes_of={
                "data-parallel": self._bytes_of(REPLICA_COLLECTIVES),
                "tensor-parallel": self._bytes_of(TP_COLLECTIVES),
            },
            explained_at=self._explained_at,
            correlations=self.correlations,
        )
        findings = find_stragglers(evidence)
        self._explained_at[_explained_ranks(findings)] = newest.steps[-1]
        # a rank that waits for data is on a host that is not slow
        of_hosts = [finding for finding in findings if finding.cause is not Cause.DATA]
        scores = rank_scores(compute, of_hosts) if evidence.is_enough else ()
        self.assessment = StragglerAssessment(
            findings=findings,
            ranks_without_peers=tuple(np.flatnonzero(self.peers.num_peers == 0).tolist()),
            silent_ranks=self.silent_ranks(),
            first_step=int(window.steps[0]),
            last_step=int(window.steps[-1]),
            num_steps=len(window.steps),
            num_left_out=self.num_left_out,
            is_enough=len(window.steps) >= self.thresholds.num_steps and bool((self.peers.num_peers > 0).all()),
            thresholds=replace(self.thresholds, score=least_score(self.thresholds, self.peers.num_ranks)),
            scores=scores,
            host_scores=host_scores(scores, of_hosts, self.roster.host_of),
        )

    def _bytes_of(self, operations: Sequence[Operation]) -> Float64:
        found: Float64 = self.ring.bytes_of[rows_of(operations, self.ring.operations)].sum(axis=0)
        return found


def _is_suspicious(window: ComparedSteps, thresholds: Thresholds) -> bool:
    """Return whether a rank was slow in half of the newest steps or more: a cheap check before the thorough one."""
    least = thresholds.excess * window.scale
    for aspect in (Aspect.COMPUTE, Aspect.DATA, Aspect.GC):
        seen = (window.excess[:, aspect] >= least).sum(axis=0)
        if (seen >= max(2, len(window.steps) // 2)).any():
            return True
    return False


def _explained_ranks(findings: Sequence[Finding]) -> list[int]:
    """Return the ranks that are slow because of their samples."""
    return [rank for finding in findings if finding.cause is Cause.LENGTHS for rank in finding.ranks]


def rank_scores(compute: Candidates, findings: Sequence[Finding]) -> tuple[float, ...]:
    """Return the score of each rank, by rank."""
    scores = np.nan_to_num(np.maximum(compute.score, 0.0), posinf=0.0)
    for finding in findings:
        for rank, score in zip(finding.ranks, finding.rank_scores, strict=False):  # ranks of a slow stage have no score
            scores[rank] = max(scores[rank], score)
    return tuple(scores.tolist())


def host_scores(
    scores: Sequence[float], findings: Sequence[Finding], host_of: Callable[[int], str]
) -> dict[str, float]:
    """Return the score of each host. `host_of` returns "" for a rank whose host is not known."""
    found = greatest_by_host((host_of(rank), score) for rank, score in enumerate(scores))
    named = greatest_by_host(entry for finding in findings for entry in finding.scores.items())
    return {**found, **named}
