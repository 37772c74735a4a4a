"""Types of /job: the identity of the job, and what the caller may do.

The page reads it when it opens, and after each reconnection.
"""

from __future__ import annotations

from typing import Literal

from megatrain_dashboard.responses.document import Document, LayoutDocument


class RoundDocument(Document):
    """A round that ranks reported; `hosts` by first rank."""

    number: int
    began_unix_s: float | None
    world_size: int
    first_step: int | None
    last_step: int | None


class OperationDocument(Document):
    """A kind of span that the heat map and the timeline can show."""

    name: str
    number: int
    lane: str
    """compute, tp, pp-send, pp-recv, dp or host."""
    is_exchange: bool


class JobDocument(Document):
    """The response of /job."""

    job: str
    run_directory: str
    is_recorded: bool
    """Whether this is the history of a run, without its etcd: nothing changes and no action is possible."""
    layout: LayoutDocument | None
    rounds: tuple[RoundDocument, ...]
    """The oldest first; the last round is shown unless another is chosen."""
    operations: tuple[OperationDocument, ...]
    role: Literal["viewer", "operator"]
    can_act: bool
    """Whether actions are enabled, the job is live and the caller is an operator."""
    why_not_act: str
    """Empty if `can_act` is true; else a sentence."""
    has_session: bool
    """Whether the caller logged in through the page, and can log out."""
    perfetto_url: str
    """The address of the site's own Perfetto; empty: the trace is downloaded."""
    version: str
