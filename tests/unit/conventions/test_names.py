"""No name that docs/glossary.md excludes is defined in the packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase, translate
from pathlib import Path

from tests.helpers.source_tree import ROOT, nodes, python_files, relative

GLOSSARY = ROOT / "docs" / "glossary.md"


def banned_patterns(text: str) -> list[str]:
    """Return the backticked names of the last column of the glossary's three-column tables."""
    patterns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3:
            patterns += re.findall(r"`([^`]+)`", cells[2])
    return patterns


NAMING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.arg, ast.Name, ast.Attribute, ast.alias)


def defined_names(found: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield every name that a module defines: keywords in calls of other modules' functions are not included."""
    for node in found:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno


def violations(found: Iterable[ast.AST], patterns: list[str]) -> list[tuple[str, int, str]]:
    # Most names match no pattern: each is checked once against all patterns.
    any_of = re.compile("|".join(map(translate, patterns)))
    return [
        (name, line, pattern)
        for name, line in defined_names(found)
        if any_of.match(bare(name))
        for pattern in patterns
        if fnmatchcase(bare(name), pattern)
    ]


def bare(name: str) -> str:
    return name.strip("_").lower()


def test_glossary_is_read() -> None:
    patterns = banned_patterns(GLOSSARY.read_text())

    assert {"virtual_pipeline*", "n_embd", "batch_size", "?p_degree", "iteration", "nb_*"} <= set(patterns)
    assert "micro_batch_size" not in patterns


def test_violation_is_found() -> None:
    source = (
        "class A:\n    def f(self, n_heads):\n        self.batch_size = g(batch_size=n_heads, micro_batch_size=1)\n"
    )

    assert violations(ast.walk(ast.parse(source)), ["n_*", "batch_size"]) == [
        ("n_heads", 2, "n_*"),
        ("batch_size", 3, "batch_size"),
    ]


def test_no_banned_name_is_defined() -> None:
    patterns = banned_patterns(GLOSSARY.read_text())
    paths: list[Path] = python_files("megatrain", "launcher", "diagnostics")
    found = [
        f"{relative(path)}:{line}: {name!r} is ruled out by {pattern!r} in docs/glossary.md"
        for path in paths
        for name, line, pattern in violations(nodes(path, *NAMING), patterns)
    ]

    assert not found, "\n".join(found)
