"""The name of a public class is unique in the three packages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tests.helpers.source_tree import python_files, relative


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
