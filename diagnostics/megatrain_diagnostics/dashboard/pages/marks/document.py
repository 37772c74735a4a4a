"""Marks on charts: what happened, at which step and when."""

from __future__ import annotations

from typing import Literal

from megatrain_diagnostics.dashboard.answers.document import Document

MarkKind = Literal["incident", "note", "config", "checkpoint", "round", "bad"]


class MarkDocument(Document):
    """Something that happened, or several of a kind that lie so close that no chart can tell them apart."""

    kind: MarkKind
    step: int | None
    """Null: it belongs to no step that is known."""
    at_unix_s: float | None
    text: str
    """A sentence; of several what they are."""
    ref: str
    """An incident's id, a note's id, a round's number, a checkpoint's step; empty for several."""
    count: int
    last_step: int | None
    """Of several; else as `step`."""
    last_unix_s: float | None


class ChangedKeyDocument(Document):
    key: str
    before: str
    """As TOML; empty: the configuration did not have it."""
    after: str


class ConfigChangeDocument(Document):
    """A round that began with another configuration than the one before it."""

    round: int
    first_step: int
    at_unix_s: float
    keys: tuple[ChangedKeyDocument, ...]


class MarksDocument(Document):
    """The answer of /marks: by time. `changes`: of the configuration, in the same part of the run."""

    marks: tuple[MarkDocument, ...]
    changes: tuple[ConfigChangeDocument, ...]
