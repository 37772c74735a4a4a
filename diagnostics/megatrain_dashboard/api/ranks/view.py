"""Make the document of /ranks/{rank}: the place of a rank, its peers, and its last report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import operation_name
from megatrain_dashboard.api.ranks.document import (
    PeerGroupDocument,
    RankDocument,
    RankPositionDocument,
    StackDocument,
)
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.analysis.hang import RankStanding, Suspect
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Spans, Stacks

_MAX_STACKS = 32
_MAX_FRAMES = 200
_NS = 1e9


@dataclass(frozen=True, slots=True)
class RankInputs:
    """The data of one rank. `spans`: of its newest recorded step. `standing`: its position in a hang."""

    rank: int
    roster: Roster
    spans: Spans
    stacks: Stacks
    pid: int | None = None
    step: int | None = None
    """The newest step in its sums."""
    score: float | None = None
    least_score: float | None = None
    standing: RankStanding | None = None
    black_box: str = ""
    findings: tuple[Finding, ...] = ()
    suspects: tuple[Suspect, ...] = ()


def rank_document(given: RankInputs) -> RankDocument:
    """Return the document of a rank."""
    roster, rank, standing = given.roster, given.rank, given.standing
    return RankDocument(
        round=roster.round,
        rank=rank,
        host=roster.host_of(rank),
        place=dict(roster.coordinate(rank)),
        pid=given.pid,
        step=given.step if standing is None or standing.step < 0 else standing.step,
        operation=_operation(given),
        phase="" if standing is None else standing.phase,
        process_state="" if standing is None else standing.process_state or "",
        score=given.score,
        least_score=given.least_score,
        groups=tuple(
            PeerGroupDocument(
                name=one.name, first_rank=one.first_rank, num_ranks=one.num_ranks, stride=one.stride
            )
            for (of_rank, _), one in sorted(roster.groups.items())
            if of_rank == rank
        ),
        positions=() if standing is None else tuple(
            RankPositionDocument(group=group, entered=one.entered, left=one.finished)
            for group, one in sorted(standing.positions.items())
        ),
        stacks=_newest_stacks(given.stacks),
        black_box=given.black_box,
        findings=_sentences(given),
    )  # fmt: skip


def _operation(given: RankInputs) -> str:
    if given.standing is not None and given.standing.in_flight:
        return given.standing.in_flight
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
    of_findings = [sentence for one in given.findings if given.rank in one.ranks for sentence in one.evidence]
    return (*(one.evidence for one in given.suspects if one.rank == given.rank), *of_findings)
