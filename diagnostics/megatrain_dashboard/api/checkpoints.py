"""GET /checkpoints: the checkpoints of a run, whether they are damaged, and which one a job would resume from."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from megatrain.checkpoint.survey import CheckpointState, FoundCheckpoint
from megatrain.formatting import printable
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.sources.facts import CheckpointsSeen
from megatrain_dashboard.sources.window import WHOLE_RUN, Window

WHOLE = "whole"
_NO_COMMIT = "it has no COMMIT and is not being written; it may have been complete earlier"


class CheckpointDocument(Document):
    branch: str
    step: int
    place: str
    state: str
    """committed, pinned, unfinished, damaged or being removed."""
    is_in_line: bool
    """Whether it belongs to the job's history; otherwise a restore to an older step abandoned it."""
    is_resume_point: bool
    num_bytes: int | None
    written_unix_s: float | None
    consumed_tokens: int | None
    round: int | None
    pin_reason: str
    problem: str
    verified_unix_s: float | None
    """The recorded time at which the whole checkpoint was last read and compared; null: never, or not recorded."""
    verify_result: str
    """"whole", or what differs from what was written; empty where it was never verified."""


class BranchDocument(Document):
    name: str
    parent: str
    parent_step: int | None
    created_unix_s: float | None
    reason: str
    is_current: bool


class CheckpointsDocument(Document):
    """The response of /checkpoints: the newest first."""

    place: str
    resume_reason: str
    branches: tuple[BranchDocument, ...]
    checkpoints: tuple[CheckpointDocument, ...]
    num_elsewhere: int
    """The number of checkpoints that were written in other parts of the run."""


def checkpoints_document(seen: CheckpointsSeen, window: Window = WHOLE_RUN) -> CheckpointsDocument:
    """Return the checkpoints of a part of the run and the one to resume from, the newest first."""
    survey = seen.survey
    if survey is None:
        reason = printable(seen.problem) or "the checkpoints have not been read yet"
        return CheckpointsDocument(
            place=seen.location, resume_reason=reason, branches=(), checkpoints=(), num_elsewhere=0
        )
    candidate = survey.resume.candidate
    resumed = None if candidate is None else (candidate.branch, candidate.step)
    skipped = "".join(f"; {problem}" for problem in survey.resume.skipped)
    shown = [
        checkpoint
        for checkpoint in survey.checkpoints
        if window.holds(checkpoint.written_unix_s) or (checkpoint.branch, checkpoint.step) == resumed
    ]
    newest = sorted(shown, key=lambda checkpoint: (checkpoint.written_unix_s or 0.0, checkpoint.step), reverse=True)
    return CheckpointsDocument(
        place=seen.location,
        resume_reason=printable(f"{survey.resume.reason}{skipped}"),
        branches=tuple(
            BranchDocument.of(branch, reason=printable(branch.reason), is_current=branch.name == survey.current)
            for branch in survey.branches
        ),
        checkpoints=tuple(
            _checkpoint(checkpoint, is_resume_point=(checkpoint.branch, checkpoint.step) == resumed)
            for checkpoint in newest
        ),
        num_elsewhere=len(survey.checkpoints) - len(shown),
    )


def _checkpoint(found: FoundCheckpoint, *, is_resume_point: bool) -> CheckpointDocument:
    is_bare, verification = found.state is CheckpointState.UNCOMMITTED, found.verification
    return CheckpointDocument.of(
        found,
        place=printable(str(found.location)),
        state=str(CheckpointState.DAMAGED if is_bare else found.state),
        is_in_line=found.is_in_ancestry,
        is_resume_point=is_resume_point,
        pin_reason=printable(found.pin_reason or ""),
        problem=printable(found.problem or (_NO_COMMIT if is_bare else "")),
        verified_unix_s=None if verification is None else verification.at_unix_s,
        verify_result="" if verification is None else verification.problem or WHOLE,
    )


def router(parts: DashboardParts) -> APIRouter:
    """Return the route that answers with the checkpoints of a part of the run."""
    routes = APIRouter(tags=["checkpoints"])

    @routes.get("/checkpoints", response_model=CheckpointsDocument)
    def checkpoints(request: Request, begin: From = "", end: To = "") -> Response:
        """Return the checkpoints that were written in a part of the run, in the state last read, newest first.

        The checkpoint that the job would resume from is always among them.
        """
        window = parts.window(begin, end)
        key = ("checkpoints", parts.source.live().versions["checkpoints"], window)
        return parts.responses.answer(
            request, key, lambda: checkpoints_document(parts.source.facts().checkpoints, window)
        )

    return routes
