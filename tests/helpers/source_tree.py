"""The files of this repository that tests read: sources, documents and configuration, never build products."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_files(*directories: str) -> list[Path]:
    """Return the Python files below the named directories of the repository."""
    return sorted(path for directory in directories for path in (ROOT / directory).rglob("*.py"))


def documents() -> list[Path]:
    """Return the Markdown files that users read."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every imported module, or name within a module, in full, with its line number."""
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
