"""The table of reasons for evictions has all texts, and the runbook has the same rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from megatrain_launcher.driver.evictions import EvictionReason
from tests.helpers.source_tree import ROOT, naming, nodes, python_files

RUNBOOK = ROOT / "docs" / "runbooks" / "host-evicted-or-cordoned.md"
NAMES = ("EvictionReason", "EVICT")
MODULES = [
    path for path in naming(python_files("launcher/megatrain_launcher/driver"), *NAMES) if path.stem != "evictions"
]
WORDED_ELSEWHERE = {
    ("verdict_actions", "_incident"): "outcome_rules has its text: a verdict that waits has the reason too"
}


def reasons_in(tree: ast.AST) -> set[str]:
    """Return the names of the reasons that a part of a module uses."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "EvictionReason"
    }


def chooses_eviction(function: ast.FunctionDef) -> bool:
    """Return whether a function assigns EVICT as an action, and does not only compare with it."""
    compared = {id(part) for node in ast.walk(function) if isinstance(node, ast.Compare) for part in ast.walk(node)}
    return any(
        isinstance(node, ast.Name) and node.id == "EVICT" and id(node) not in compared for node in ast.walk(function)
    )


def functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in MODULES:
        yield from ((path, function) for function in nodes(path, ast.FunctionDef))


def test_each_reason_is_used_by_one_function() -> None:
    used = [name for _, function in functions() for name in reasons_in(function)]

    assert sorted(used) == sorted(EvictionReason.__members__)


def test_evictions_take_their_reason_from_the_table() -> None:
    without = {
        (path.stem, function.name)
        for path, function in functions()
        if chooses_eviction(function) and not reasons_in(function)
    }
    assert without == WORDED_ELSEWHERE.keys()


def test_the_runbook_has_the_same_rows() -> None:
    def sentence(reason: EvictionReason) -> str:
        return re.sub(r"\{(\w+)[^}]*\}", lambda found: found[1].upper(), reason.sentence)

    rows = [f"| `{sentence(one)}` | {one.cause} | {'yes' if one.is_cordoned else 'no'} |" for one in EvictionReason]
    found = [line for line in RUNBOOK.read_text().splitlines() if line.startswith("| `")]

    assert found == rows
