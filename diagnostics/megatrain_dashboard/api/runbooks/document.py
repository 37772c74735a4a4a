"""Types of a runbook: steps of text, tables and commands that can be copied."""

from __future__ import annotations

from typing import Literal

from megatrain_dashboard.responses.document import Document


class TextDocument(Document):
    """A piece of a line."""

    kind: Literal["text", "code", "strong", "runbook", "document"]
    text: str
    target: str
    """A runbook's name, "hang.md" or "health.md#recovering"; a document's path in the project; else empty."""


class RunbookBlockDocument(Document):
    """A paragraph or an item of a list (`texts`), a table (`rows` of cells), or commands."""

    kind: Literal["paragraph", "item", "table", "commands"]
    texts: tuple[TextDocument, ...]
    rows: tuple[tuple[tuple[TextDocument, ...], ...], ...]
    """The first row is the head."""
    commands: tuple[str, ...]
    """Commands with the names of this job; unknown names are words in capitals: HOST, RANK, VERDICT."""
    example: str
    """Example output of the commands, from another job."""


class RunbookStepDocument(Document):
    title: str
    anchor: str
    blocks: tuple[RunbookBlockDocument, ...]


class RunbookDocument(Document):
    """The response of /runbooks/{name}."""

    name: str
    title: str
    incident_id: str
    """The incident whose host, rank and round the commands name; empty: none."""
    steps: tuple[RunbookStepDocument, ...]


class RunbookNameDocument(Document):
    name: str
    title: str


class RunbooksDocument(Document):
    """The response of /runbooks, by title."""

    runbooks: tuple[RunbookNameDocument, ...]
