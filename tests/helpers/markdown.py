"""The parts of Markdown that are needed to run and check documents: fenced blocks, links and heading anchors."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(r"^\s*```\s*(\S*)\s*$")
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(\S.*?)\s*-->")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")


@dataclass(frozen=True, slots=True)
class MarkdownBlock:
    """A fenced block. `skip_reason` comes from a comment `<!-- not run: reason -->` right before it."""

    language: str
    line: int
    text: str
    skip_reason: str = ""

    @property
    def commands(self) -> list[str]:
        """The lines of a console block which start with "$ ", with continued lines joined."""
        commands: list[str] = []
        is_continued = False
        for line in self.text.splitlines():
            if is_continued:
                commands[-1] = f"{commands[-1][:-1].rstrip()} {line.removeprefix('>').strip()}"
            elif line.startswith("$ "):
                commands.append(line[2:].strip())
            else:
                continue
            is_continued = commands[-1].endswith("\\")
        return commands


def fenced_blocks(text: str) -> list[MarkdownBlock]:
    """Return the fenced blocks of a document in order."""
    blocks: list[MarkdownBlock] = []
    language: str | None = None
    start, body, skip_reason = 0, [], ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if language is not None:
            if fence is not None and not fence[1]:
                blocks.append(MarkdownBlock(language, start, "\n".join(body), skip_reason))
                language, skip_reason = None, ""
            else:
                body.append(line)
        elif fence is not None:
            language, start, body = fence[1], number, []
        elif marker := _NOT_RUN.search(line):
            skip_reason = marker[1]
        elif line.strip():
            skip_reason = ""
    return blocks


def without_blocks(text: str) -> str:
    """Return a document without its fenced blocks and inline code, where brackets are not links."""
    lines = []
    is_inside = False
    for line in text.splitlines():
        if _FENCE.match(line):
            is_inside = not is_inside
        elif not is_inside:
            lines.append(re.sub(r"`[^`]*`", "", line))
    return "\n".join(lines)


def link_targets(text: str) -> list[str]:
    """Return the targets of all links."""
    return _LINK.findall(without_blocks(text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, formed as GitHub forms them."""
    found = set()
    is_inside = False
    for line in text.splitlines():
        if _FENCE.match(line):
            is_inside = not is_inside
        elif not is_inside and (heading := re.match(r"#+\s+(.*)", line)):
            anchor = re.sub(r"[^\w\s-]", "", heading[1].strip().lower())
            found.add(re.sub(r"\s", "-", anchor))
    return found
