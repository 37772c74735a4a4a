"""Make the document of /checkpoints: which exist, whether they are whole, which one a job would resume from.

Texts from files that any user may have written are made printable, because JSON can contain characters that no encoding
can represent.
"""

from __future__ import annotations

from megatrain.checkpoint.survey import CheckpointState, FoundCheckpoint
from megatrain.formatting.terminal import printable
from megatrain_dashboard.api.checkpoints.document import (
    BranchDocument,
    CheckpointDocument,
    CheckpointsDocument,
)
from megatrain_dashboard.sources.facts import CheckpointsSeen
from megatrain_dashboard.sources.window import WHOLE_RUN, Window

WHOLE = "whole"
_NO_COMMIT = "it has no COMMIT and is not being written; it may have been complete earlier"


def checkpoints_document(seen: CheckpointsSeen, window: Window = WHOLE_RUN) -> CheckpointsDocument:
    """Return the checkpoints of a part of the run and the one to resume from, the newest first."""
    survey = seen.survey
    if survey is None:
        reason = printable(seen.problem) or "the checkpoints have not been read yet"
        return CheckpointsDocument(place=seen.place, resume_reason=reason, branches=(), checkpoints=(), num_elsewhere=0)
    candidate = survey.resume.candidate
    resumed = None if candidate is None else (candidate.branch, candidate.step)
    skipped = "".join(f"; {one}" for one in survey.resume.skipped)
    shown = [one for one in survey.checkpoints if window.holds(one.written_unix_s) or (one.branch, one.step) == resumed]
    newest = sorted(shown, key=lambda one: (one.written_unix_s or 0.0, one.step), reverse=True)
    return CheckpointsDocument(
        place=seen.place,
        resume_reason=printable(f"{survey.resume.reason}{skipped}"),
        branches=tuple(
            BranchDocument(
                name=one.name,
                parent=one.parent,
                parent_step=one.parent_step,
                created_unix_s=one.created_unix_s,
                reason=printable(one.reason),
                is_current=one.name == survey.current,
            )
            for one in survey.branches
        ),
        checkpoints=tuple(_checkpoint(one, is_resume_point=(one.branch, one.step) == resumed) for one in newest),
        num_elsewhere=len(survey.checkpoints) - len(shown),
    )


def _checkpoint(found: FoundCheckpoint, *, is_resume_point: bool) -> CheckpointDocument:
    is_bare, verification = found.state is CheckpointState.UNCOMMITTED, found.verification
    return CheckpointDocument(
        branch=found.branch,
        step=found.step,
        place=printable(str(found.location)),
        state=str(CheckpointState.DAMAGED if is_bare else found.state),
        is_in_line=found.is_in_ancestry,
        is_resume_point=is_resume_point,
        num_bytes=found.num_bytes,
        written_unix_s=found.written_unix_s,
        consumed_tokens=found.consumed_tokens,
        round=found.round,
        pin_reason=printable(found.pin_reason or ""),
        problem=printable(found.problem or (_NO_COMMIT if is_bare else "")),
        verified_unix_s=None if verification is None else verification.at_unix_s,
        verify_result="" if verification is None else verification.problem or WHOLE,
    )
