"""The files of this repository that tests read: sources, documents and configuration, never build products."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
Node = TypeVar("Node", bound=ast.AST)


def python_files(*directories: str) -> list[Path]:
    """Return the Python files below the named directories of the repository."""
    return sorted(path for directory in directories for path in (ROOT / directory).rglob("*.py"))


def documents() -> list[Path]:
    """Return the Markdown files that users read."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def naming(paths: Iterable[Path], *texts: str) -> list[Path]:
    """Return the files that contain one of these texts: a name in a syntax tree is also in the text of its file."""
    return [path for path in paths if any(text in path.read_text(encoding="utf-8") for text in texts)]


def nodes(path: Path, *kinds: type[Node]) -> Iterator[Node]:
    """Yield the nodes of some kinds in the syntax tree of a Python file."""
    by_kind = _nodes_by_kind(path)
    for kind in kinds:
        yield from by_kind.get(kind, ())


@cache
def _nodes_by_kind(path: Path) -> dict[type[ast.AST], list[Any]]:
    """Parse a file and walk its tree, once for all rules, except for the use of names (`ctx`)."""
    found: dict[type[ast.AST], list[Any]] = {}
    reached: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"), filename=str(path))]
    for node in reached:  # The list grows: the order of ast.walk, in a third of its time.
        found.setdefault(type(node), []).append(node)
        for name in node._fields:
            value = getattr(node, name, None)
            if type(value) is list:
                reached += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                reached.append(value)
    return found


def forget_trees() -> None:
    """Release all syntax trees."""
    _nodes_by_kind.cache_clear()


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every imported module, or name within a module, with its full name and line number."""
    for plain in nodes(path, ast.Import):
        yield from ((alias.name, plain.lineno) for alias in plain.names)
    for node in nodes(path, ast.ImportFrom):
        if node.module is not None:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
