"""Types of marks on charts: what happened, at which step and when."""

from __future__ import annotations

from typing import Literal

from megatrain_dashboard.responses.document import Document

MarkKind = Literal["incident", "note", "config", "checkpoint", "round", "bad"]


class MarkDocument(Document):
    """Something that happened, or several events of one kind that are too close to be distinct in a chart."""

    kind: MarkKind
    step: int | None
    """Null: it belongs to no known step."""
    at_unix_s: float | None
    text: str
    """A sentence; for several events their number and kind."""
    ref: str
    """An incident's id, a note's id, a round's number, a checkpoint's step; empty for several."""
    count: int
    last_step: int | None
    """The last step of several events; else as `step`."""
    last_unix_s: float | None


class ChangedKeyDocument(Document):
    key: str
    before: str
    """The value as TOML; empty: the configuration did not have the key."""
    after: str


class ConfigChangeDocument(Document):
    """A round that began with another configuration than the one before it."""

    round: int
    first_step: int
    at_unix_s: float
    keys: tuple[ChangedKeyDocument, ...]


class MarksDocument(Document):
    """The response of /marks: by time. `changes`: of the configuration, in the same part of the run."""

    marks: tuple[MarkDocument, ...]
    changes: tuple[ConfigChangeDocument, ...]
