"""No module imports itself through others, not even within a function: shared code belongs in a lower module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.source_tree import ROOT, imported_modules, python_files

PACKAGES = {
    "megatrain": ROOT / "megatrain",
    "megatrain_job": ROOT / "launcher" / "megatrain_job",
    "megatrain_launcher": ROOT / "launcher" / "megatrain_launcher",
    "megatrain_diagnostics": ROOT / "diagnostics" / "megatrain_diagnostics",
    "megatrain_dashboard": ROOT / "diagnostics" / "megatrain_dashboard",
}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def a_circle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the modules of a circle, empty where there is none. `imports`: by module, what it imports, in full."""
    graph = {
        module: {name if name in imports else name.rpartition(".")[0] for name in names} & imports.keys() - {module}
        for module, names in imports.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    root = PACKAGES[package]
    files = python_files(root.relative_to(ROOT).as_posix())
    found = a_circle({module_name(path, root): [name for name, _ in imported_modules(path)] for path in files})

    assert not found, " <- ".join(found)


def test_a_circle_is_found() -> None:
    assert a_circle({"a": ["b.x"], "b": ["json"], "c": ["a"]}) == []
    assert set(a_circle({"a": ["b.x"], "b": ["c"], "c": ["a"]})) == {"a", "b", "c"}
