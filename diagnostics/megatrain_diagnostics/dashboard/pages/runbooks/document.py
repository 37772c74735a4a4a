"""A runbook as steps: words, tables and commands that can be copied."""

from __future__ import annotations

from typing import Literal

from megatrain_diagnostics.dashboard.answers.document import Document


class TextDocument(Document):
    """A piece of a line."""

    kind: Literal["words", "code", "strong", "runbook", "document"]
    text: str
    target: str
    """Of a runbook its name, "hang.md" or "health.md#recovering"; of a document its path in the project; else empty."""


class RunbookBlockDocument(Document):
    """A paragraph or an item of a list (`texts`), a table (`rows` of cells), or commands."""

    kind: Literal["paragraph", "item", "table", "commands"]
    texts: tuple[TextDocument, ...]
    rows: tuple[tuple[tuple[TextDocument, ...], ...], ...]
    """The first one is the head."""
    commands: tuple[str, ...]
    """With the names of this job; what is not known is in capitals: HOST, RANK, VERDICT."""
    example: str
    """What they answer, of another job."""


class RunbookStepDocument(Document):
    title: str
    anchor: str
    blocks: tuple[RunbookBlockDocument, ...]


class RunbookDocument(Document):
    """The answer of /runbooks/{name}."""

    name: str
    title: str
    incident_id: str
    """Whose host, rank and round the commands name; empty: nobody's."""
    steps: tuple[RunbookStepDocument, ...]


class RunbookNameDocument(Document):
    name: str
    title: str


class RunbooksDocument(Document):
    """The answer of /runbooks, by title."""

    runbooks: tuple[RunbookNameDocument, ...]
