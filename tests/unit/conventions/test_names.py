"""Names: none that docs/glossary.md excludes, unique classes, a short public API, and tests that name their topic."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from pathlib import Path

import pytest

import megatrain
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


def public_classes(source: str) -> list[str]:
    return re.findall(r"^class ([A-Za-z]\w*)", source, re.MULTILINE)


def shared_names(classes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the names that are used more than once, with the places. `classes`: the names by place."""
    places: dict[str, list[str]] = defaultdict(list)
    for place, names in classes.items():
        for name in names:
            places[name].append(place)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def test_a_class_name_means_one_class() -> None:
    files = python_files("megatrain", "launcher", "diagnostics")
    found = shared_names({relative(path): public_classes(path.read_text()) for path in files})

    assert not found, "\n".join(f"{name}: {', '.join(places)}" for name, places in found.items())


def test_a_shared_name_is_found() -> None:
    source = "class _A: ...\nclass B:\n    class C: ...\nclass D: ...\n"

    assert public_classes(source) == ["B", "D"]
    assert shared_names({"one.py": ["B", "D"], "two.py": ["D", "E"]}) == {"D": ["one.py", "two.py"]}


PUBLIC = {"Callback", "EvaluationReport", "LoadedModel", "RunRecord", "StepReport", "Trainer", "load", "read_run"}
"""A longer list is a decision: docs/adr/0063-python-api.md."""


def test_the_package_declares_the_types() -> None:
    stub = ast.parse((ROOT / "megatrain" / "__init__.pyi").read_text())
    typed = {
        alias.asname: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert typed.keys() == PUBLIC
    assert set(megatrain.__all__) == PUBLIC | {"__version__"}
    assert set(dir(megatrain)) >= PUBLIC
    for name, (module, original) in typed.items():
        assert getattr(megatrain, name) is getattr(__import__(str(module), fromlist=[original]), original)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'megatrain' has no attribute 'lode'"):
        megatrain.lode  # type: ignore[attr-defined]  # noqa: B018


MAX_LENGTH = 60
WITHOUT_SUBJECT = re.compile(r"test_(what|of|where|one|nothing|who|whoever|nobody|somebody)_")


def name_problem(name: str) -> str | None:
    """Return why a test cannot have this name, or None."""
    if len(name) > MAX_LENGTH:
        return f"{len(name)} characters, at most {MAX_LENGTH}"
    found = WITHOUT_SUBJECT.match(name)
    return f'begins with "{found[1]}", which is no subject' if found else None


def test_names_of_tests_are_short_and_begin_with_a_subject() -> None:
    problems = [
        f"{relative(path)}: {name}: {problem}"
        for path in python_files("tests")
        for name in re.findall(r"\bdef (test_\w+)\(", path.read_text())
        if (problem := name_problem(name))
    ]

    assert not problems, "\n".join(problems)


def test_unsuitable_name_of_a_test_is_found() -> None:
    assert name_problem("test_index_with_a_foreign_file_is_refused") is None
    assert name_problem("test_" + "x" * 56) == "61 characters, at most 60"
    assert name_problem("test_what_is_no_index_is_refused") == 'begins with "what", which is no subject'
    assert name_problem("test_of_two_launches_one_gets_the_name") == 'begins with "of", which is no subject'
