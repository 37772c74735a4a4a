"""Who the job is, and what this page may do with it: read once when the page opens, and after each reconnection."""

from __future__ import annotations

from typing import Literal

from megatrain_diagnostics.dashboard.answers.document import Document, LayoutDocument


class RoundDocument(Document):
    """A round that ranks reported; `hosts` by first rank."""

    number: int
    began_unix_s: float | None
    world_size: int
    first_step: int | None
    last_step: int | None


class OperationDocument(Document):
    """A kind of span that heat map and timeline know."""

    name: str
    number: int
    lane: str
    """compute, tp, pp-send, pp-recv, dp or host."""
    is_exchange: bool


class JobDocument(Document):
    """The answer of /job."""

    job: str
    run_directory: str
    is_recorded: bool
    """The history of a run, without its etcd: nothing changes and nothing can be asked for."""
    layout: LayoutDocument | None
    rounds: tuple[RoundDocument, ...]
    """The oldest first; the last one is shown unless another is chosen."""
    operations: tuple[OperationDocument, ...]
    role: Literal["viewer", "operator"]
    can_act: bool
    """Actions are enabled, the job is live and the asking person is an operator."""
    why_not_act: str
    """Empty where can_act; else a sentence."""
    has_session: bool
    """Who asks signed in through the page, and can sign out."""
    perfetto_url: str
    """Of a Perfetto of the site's own; empty: the trace is downloaded."""
    version: str
