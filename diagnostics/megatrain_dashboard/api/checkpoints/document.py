"""Types of the checkpoints of a run: which exist, whether they are whole, and which one a job would resume from."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


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
