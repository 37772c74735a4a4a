"""Checkpoints of the run: which there are, whether they are whole, and which one a job would go on from."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class CheckpointDocument(Document):
    branch: str
    step: int
    place: str
    state: str
    """committed, pinned, unfinished or damaged."""
    is_in_line: bool
    """The job's history goes through it; else it was abandoned by a restore to an older step."""
    is_resume_point: bool
    num_bytes: int | None
    written_unix_s: float | None
    consumed_tokens: int | None
    round: int | None
    pin_reason: str
    problem: str
    verified_unix_s: float | None
    """When all of it was read and compared last, as recorded; null: never, or not recorded."""
    verify_result: str
    """"whole", or what is not as it was written; empty where it was never verified."""


class BranchDocument(Document):
    name: str
    parent: str
    parent_step: int | None
    created_unix_s: float | None
    reason: str
    is_current: bool


class CheckpointsDocument(Document):
    """The answer of /checkpoints: the newest first."""

    place: str
    resume_reason: str
    branches: tuple[BranchDocument, ...]
    checkpoints: tuple[CheckpointDocument, ...]
    num_elsewhere: int
    """That were written in other parts of the run."""
