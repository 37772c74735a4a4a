"""Types of an action request and of its response."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatrain_dashboard.responses.document import Document

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
    """Identifies one request: if it is sent twice, it is carried out once."""


class ActionAnswer(Document):
    """The result of an action. `is_accepted`: the driver or etcd accepted it; `is_done`: no further result follows."""

    action_id: str
    is_dry_run: bool
    is_accepted: bool
    is_done: bool
    text: str
