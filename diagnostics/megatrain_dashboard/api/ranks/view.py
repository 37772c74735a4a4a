"""Makes the documents of /ranks/{rank} and /hang.

The first has the place of a rank, its peers, and its last report; the second has ranks that did not enter a
collective, and ranks whose stacks differ from the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import operation_name
from megatrain_dashboard.api.ranks.document import (
    HangDocument,
    HangMissingDocument,
    HangSuspectDocument,
    PeerGroupDocument,
    RankDocument,
    RankPositionDocument,
    StackClusterDocument,
    StackDocument,
)
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.analysis.hang import RankActivity, Suspect
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Spans, Stacks
from megatrain_diagnostics.store.hang_answer import HangAnswer

_MAX_STACKS = 32
_MAX_FRAMES = 200
_NS = 1e9
_MAX_HANG_RANKS = 64
_MAX_CLUSTERS = 32
_MAX_CLUSTER_FRAMES = 64


@dataclass(frozen=True, slots=True)
class RankInputs:
    """The data of one rank. `spans`: the spans of its newest recorded step. `activity`: what it does in a hang."""

    rank: int
    roster: Roster
    spans: Spans
    stacks: Stacks
    pid: int | None = None
    step: int | None = None
    """The newest step in its sums."""
    score: float | None = None
    least_score: float | None = None
    activity: RankActivity | None = None
    black_box: str = ""
    findings: tuple[Finding, ...] = ()
    suspects: tuple[Suspect, ...] = ()


def rank_document(given: RankInputs) -> RankDocument:
    """Return the document of a rank."""
    roster, rank, activity = given.roster, given.rank, given.activity
    return RankDocument.of(
        given,
        round=roster.round,
        host=roster.host_of(rank),
        place=dict(roster.coordinate(rank)),
        step=given.step if activity is None or activity.step < 0 else activity.step,
        operation=_operation(given),
        phase="" if activity is None else activity.phase,
        process_state="" if activity is None else activity.process_state or "",
        groups=tuple(
            PeerGroupDocument.of(group) for (of_rank, _), group in sorted(roster.groups.items()) if of_rank == rank
        ),
        positions=() if activity is None else tuple(
            RankPositionDocument(group=group, entered=position.entered, left=position.finished)
            for group, position in sorted(activity.positions.items())
        ),
        stacks=_newest_stacks(given.stacks),
        findings=_sentences(given),
    )  # fmt: skip


def _operation(given: RankInputs) -> str:
    if given.activity is not None and given.activity.in_flight:
        return given.activity.in_flight
    if not len(given.spans.rank):
        return ""
    return operation_name(int(given.spans.operation[np.argmax(given.spans.sequence)]))


def _newest_stacks(stacks: Stacks) -> tuple[StackDocument, ...]:
    """Return the newest dump of each thread, the newest first."""
    found: dict[str, StackDocument] = {}
    for row in np.argsort(-stacks.at_ns, kind="stable").tolist():
        name = str(stacks.thread[row])
        if name not in found and len(found) < _MAX_STACKS:
            frames = tuple(str(stacks.stack[row]).splitlines()[-_MAX_FRAMES:])
            found[name] = StackDocument(thread=name, at_unix_s=int(stacks.at_ns[row]) / _NS, frames=frames)
    return tuple(found.values())


def _sentences(given: RankInputs) -> tuple[str, ...]:
    of_findings = [
        sentence for finding in given.findings if given.rank in finding.ranks for sentence in finding.evidence
    ]
    return (*(suspect.evidence for suspect in given.suspects if suspect.rank == given.rank), *of_findings)


def hang_document(round_number: int, answer: HangAnswer | None) -> HangDocument:
    """Return the document of a hang. `answer` None: nothing is known of a hang."""
    if answer is None:
        return HangDocument(
            round=round_number, source="", confidence="", reason="", incident_id="", suspects=(), missing=(), silent=(),
            waiting=(), stack_clusters=(), outlier_ranks=(),
        )  # fmt: skip
    finding, report = answer.finding, answer.finding.report
    return HangDocument(
        round=round_number,
        source=answer.source,
        confidence=finding.culprit.confidence,
        reason=finding.culprit.reason,
        incident_id=finding.culprit.incident,
        suspects=tuple(map(HangSuspectDocument.of, finding.suspects[:_MAX_HANG_RANKS])),
        missing=tuple(map(HangMissingDocument.of, report.missing[:_MAX_HANG_RANKS])),
        silent=tuple(sorted(finding.silent)),
        waiting=tuple(sorted(finding.waiting)),
        stack_clusters=tuple(
            StackClusterDocument.of(
                cluster, num_ranks=len(cluster.ranks), ranks=cluster.ranks[:_MAX_HANG_RANKS],
                frames=cluster.frames[-_MAX_CLUSTER_FRAMES:],
            )
            for cluster in answer.stacks.clusters[:_MAX_CLUSTERS]
        ),
        outlier_ranks=answer.stacks.outliers,
    )  # fmt: skip
