"""What a person asks for through the page, and what becomes of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatrain_diagnostics.dashboard.answers.document import Document

ActionKind = Literal[
    "checkpoint", "restart", "stop", "evict", "cordon", "uncordon", "approve", "dismiss", "diag-on", "diag-off"
]


class ActionRequest(Document):
    """The body of POST /actions."""

    kind: ActionKind
    target: Annotated[str, Field(max_length=256)] = ""
    """A host for evict, cordon and uncordon; a verdict's id for approve and dismiss; else empty."""
    reason: Annotated[str, Field(min_length=3, max_length=500)]
    confirmation: Annotated[str, Field(max_length=256)]
    """The job's name, typed by the person."""
    is_dry_run: bool = False
    idempotency_key: Annotated[str, Field(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    """Of one wish: sent twice, it is carried out once."""


class ActionAnswer(Document):
    """What became of it: `is_accepted` by whoever has to do it, `is_done` where nothing more is to come."""

    action_id: str
    is_dry_run: bool
    is_accepted: bool
    is_done: bool
    text: str
