"""A public class has a name of its own in the three packages: a reader who meets the name knows which one is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tests.helpers.source_tree import nodes, python_files, relative


def public_classes(module: ast.Module) -> list[str]:
    return [node.name for node in module.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def shared_names(classes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the names that are given more than once, with the places. `classes`: the names by place."""
    places: dict[str, list[str]] = defaultdict(list)
    for place, names in classes.items():
        for name in names:
            places[name].append(place)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def test_a_class_name_means_one_class() -> None:
    files = python_files("megatrain", "launcher", "diagnostics")
    found = shared_names({relative(path): public_classes(next(nodes(path, ast.Module))) for path in files})

    assert not found, "\n".join(f"{name}: {', '.join(places)}" for name, places in found.items())


def test_a_shared_name_is_found() -> None:
    source = "class _A: ...\nclass B:\n    class C: ...\nclass D: ...\n"

    assert public_classes(ast.parse(source)) == ["B", "D"]
    assert shared_names({"one.py": ["B", "D"], "two.py": ["D", "E"]}) == {"D": ["one.py", "two.py"]}
