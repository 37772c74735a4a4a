"""Parses the Markdown of runbooks into steps: headings, paragraphs, lists, tables and blocks of commands only."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatrain_dashboard.api.runbooks.document import (
    RunbookBlockDocument,
    RunbookStepDocument,
    TextDocument,
)
from megatrain_dashboard.api.runbooks.filling import Names, filled_code, filled_command

FIRST = "First"
"""The title of the text before the first heading."""
_PLACE = "docs/runbooks"
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FENCE = "```"
_PIECE = re.compile(r"`(?P<code>[^`]+)`|\[(?P<label>[^\]]+)\]\((?P<href>[^)\s]+)\)|\*\*(?P<strong>[^*]+)\*\*")
_CELL_END = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class Runbook:
    """A page of docs/runbooks."""

    name: str
    text: str

    @property
    def title(self) -> str:
        return next((line[2:].strip() for line in self.text.splitlines() if line.startswith("# ")), self.name)

    def steps(self, names: Names) -> tuple[RunbookStepDocument, ...]:
        """Return one step for each heading, in order, with the text below it."""
        parts: list[tuple[str, list[str]]] = [(FIRST, [])]
        is_fenced = False
        for line in _COMMENT.sub("", self.text).splitlines():
            is_fenced ^= line.startswith(_FENCE)
            if line.startswith("## ") and not is_fenced:
                parts.append((line[3:].strip(), []))
            elif not line.startswith("# ") or is_fenced:
                parts[-1][1].append(line)
        return tuple(
            RunbookStepDocument(title=title.replace("`", ""), anchor=anchor_of(title), blocks=blocks)
            for title, lines in parts
            if (blocks := tuple(_blocks(lines, names)))
        )


def anchor_of(title: str) -> str:
    """Return the anchor of a heading, as links contain it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def _blocks(lines: list[str], names: Names) -> Iterator[RunbookBlockDocument]:
    rest = list(lines)
    while rest:
        line = rest.pop(0)
        if not line.strip():
            continue
        if line.startswith(_FENCE):
            fenced = _take(rest, lambda following: not following.startswith(_FENCE))
            del rest[:1]
            yield from _commands(fenced, names)
        elif line.startswith("|"):
            table = [line, *_take(rest, lambda following: following.startswith("|"))]
            rows = tuple(tuple(_texts(cell, names) for cell in _cells(row)) for row in (table[0], *table[2:]))
            yield _block("table", rows=rows)
        elif line.startswith("- "):
            item = [line[2:], *_take(rest, lambda following: following.startswith("  "))]
            yield _block("item", texts=_texts(" ".join(part.strip() for part in item), names))
        else:
            more = _take(
                rest, lambda following: bool(following.strip()) and not following.startswith((_FENCE, "|", "- "))
            )
            yield _block("paragraph", texts=_texts(" ".join(part.strip() for part in (line, *more)), names))


def _take(rest: list[str], belongs: Callable[[str], bool]) -> list[str]:
    number = next((index for index, line in enumerate(rest) if not belongs(line)), len(rest))
    taken = rest[:number]
    del rest[:number]
    return taken


def _commands(lines: Iterable[str], names: Names) -> Iterator[RunbookBlockDocument]:
    """Yield a block for each group of commands with its example output."""
    commands: list[str] = []
    answer: list[str] = []
    for line in "\n".join(lines).replace("\\\n", " ").split("\n"):
        if not line.startswith("$ "):
            answer.append(line)
            continue
        if answer and commands:
            yield _block("commands", commands=tuple(commands), example="\n".join(answer).strip("\n"))
            commands = []
        answer = []
        commands.append(filled_command(re.sub(r" {2,}", " ", line[2:].strip()), names))
    yield _block("commands", commands=tuple(commands), example="\n".join(answer).strip("\n"))


def _cells(row: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in _CELL_END.split(row.strip().strip("|"))]


def _texts(line: str, names: Names) -> tuple[TextDocument, ...]:
    found: list[TextDocument] = []
    end = 0
    for piece in _PIECE.finditer(line):
        found += _words(line[end : piece.start()])
        found.append(_piece(piece, names))
        end = piece.end()
    return (*found, *_words(line[end:]))


def _words(text: str) -> list[TextDocument]:
    return [TextDocument(kind="text", text=text, target="")] if text else []


def _piece(piece: re.Match[str], names: Names) -> TextDocument:
    if piece["code"] is not None:
        return TextDocument(kind="code", text=filled_code(piece["code"], names), target="")
    if piece["strong"] is not None:
        return TextDocument(kind="strong", text=piece["strong"], target="")
    label, href = piece["label"].replace("`", ""), piece["href"]
    if "/" not in href:
        return TextDocument(kind="runbook", text=label, target=href)
    return TextDocument(kind="document", text=label, target=posixpath.normpath(posixpath.join(_PLACE, href)))


def _block(
    kind: str,
    *,
    texts: tuple[TextDocument, ...] = (),
    rows: tuple[tuple[tuple[TextDocument, ...], ...], ...] = (),
    commands: tuple[str, ...] = (),
    example: str = "",
) -> RunbookBlockDocument:
    return RunbookBlockDocument.model_validate(
        {"kind": kind, "texts": texts, "rows": rows, "commands": commands, "example": example}
    )
