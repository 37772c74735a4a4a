"""Make the document of /hang: ranks that did not enter a collective, and ranks whose stacks differ from the others."""

from __future__ import annotations

from megatrain_dashboard.api.ranks.document import (
    HangDocument,
    HangMissingDocument,
    HangSuspectDocument,
    StackClusterDocument,
)
from megatrain_diagnostics.store.hang_answer import HangAnswer

_MAX_SHOWN = 64
_MAX_CLUSTERS = 32
_MAX_FRAMES = 64


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
        suspects=tuple(
            HangSuspectDocument(
                rank=one.rank, host=one.host, place=dict(one.place), step=one.step, doing=one.doing,
                evidence=one.evidence,
            )
            for one in finding.suspects[:_MAX_SHOWN]
        ),
        missing=tuple(
            HangMissingDocument(
                group=one.group, sequence=one.sequence, waiting=tuple(one.waiting), absent=tuple(one.absent),
                silent=tuple(one.silent), loitering=tuple(one.loitering),
            )
            for one in report.missing[:_MAX_SHOWN]
        ),
        silent=tuple(sorted(finding.silent)),
        waiting=tuple(sorted(finding.waiting)),
        stack_clusters=tuple(
            StackClusterDocument(
                num_ranks=len(one.ranks), ranks=one.ranks[:_MAX_SHOWN], is_waiting=one.is_waiting,
                frames=one.frames[-_MAX_FRAMES:],
            )
            for one in answer.stacks.clusters[:_MAX_CLUSTERS]
        ),
        outlier_ranks=answer.stacks.outliers,
    )  # fmt: skip
