"""/hang: who never entered which collective, and who is not where the others are."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.pages.ranks.document import (
    HangDocument,
    HangMissingDocument,
    HangSuspectDocument,
    StackClusterDocument,
)
from megatrain_diagnostics.store.hang_answer import HangAnswer

_MOST_SHOWN = 64
_MOST_CLUSTERS = 32
_MOST_FRAMES = 64


def hang_document(round_number: int, answer: HangAnswer | None) -> HangDocument:
    """Return what is known of a hang; None: nothing is."""
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
            for one in finding.suspects[:_MOST_SHOWN]
        ),
        missing=tuple(
            HangMissingDocument(
                group=one.group, sequence=one.sequence, waiting=tuple(one.waiting), absent=tuple(one.absent),
                silent=tuple(one.silent), loitering=tuple(one.loitering),
            )
            for one in report.missing[:_MOST_SHOWN]
        ),
        silent=tuple(sorted(finding.silent)),
        waiting=tuple(sorted(finding.waiting)),
        stack_clusters=tuple(
            StackClusterDocument(
                num_ranks=len(one.ranks), ranks=one.ranks[:_MOST_SHOWN], is_waiting=one.is_waiting,
                frames=one.frames[-_MOST_FRAMES:],
            )
            for one in answer.stacks.clusters[:_MOST_CLUSTERS]
        ),
        outlier_ranks=answer.stacks.outliers,
    )  # fmt: skip
