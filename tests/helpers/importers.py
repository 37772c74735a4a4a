"""The tests of a product module: those that import it or an importer of it, and those of its package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.helpers.source_tree import ROOT, imported_modules, python_files, relative

PRODUCT = (
    "megatrain",
    "launcher/megatrain_job",
    "launcher/megatrain_launcher",
    "diagnostics/megatrain_diagnostics",
    "diagnostics/megatrain_dashboard",
)
_TESTS = ("tests/unit", "tests/dist")


def module_name(path: Path) -> str:
    """Return the name by which a product file is imported: `megatrain.config.config`."""
    inside = path.relative_to(ROOT).with_suffix("")
    parts = inside.parts[1:] if inside.parts[0] in ("launcher", "diagnostics") else inside.parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files_that_test(path: Path) -> list[str]:
    """Return the test files of a product file, relative to the root: first those whose path has most of its words.

    They import it, or an importer of it; if there are none, an importer of importers. The tests of its package follow.
    """
    near = {module_name(path)}
    while True:
        wider = near.union(*(_importers().get(one, ()) for one in near))
        found = [test for test, names in _imports_of_tests().items() if names & wider]
        if found or wider == near:
            break
        near = wider
    words = _words(relative(path))

    def distance(test: str) -> tuple[int, int, str]:
        return -len(words & _words(test)), len(_words(test) - words), test

    return sorted({*found, *_tests_of_package(path)}, key=distance)


def _words(path: str) -> frozenset[str]:
    return frozenset(re.split(r"[/_.]", path))


def _tests_of_package(path: Path) -> list[str]:
    package = module_name(path.parent / "__init__.py")
    names = {part.removeprefix("megatrain_") for part in package.split(".")} - {"megatrain"}
    return [
        relative(test) for test in python_files(*(f"tests/unit/{name}" for name in sorted(names))) if _is_test(test)
    ]


def _is_test(path: Path) -> bool:
    return path.name.startswith("test_")


@cache
def _modules() -> frozenset[str]:
    return frozenset(module_name(path) for path in python_files(*PRODUCT))


@cache
def _importers() -> dict[str, set[str]]:
    """Return, by product module, the product modules that import it. The command line imports each command by name."""
    found: dict[str, set[str]] = {}
    for path in python_files(*PRODUCT):
        if "commands" in path.parts:
            found.setdefault(module_name(path), set()).add("megatrain.cli")
        for module in _product_imports(path):
            found.setdefault(module, set()).add(module_name(path))
    return found


@cache
def _imports_of_tests() -> dict[str, frozenset[str]]:
    """Return the product modules that each test file imports, directly and through tests.helpers."""
    helpers = {
        f"tests.helpers.{path.stem}": frozenset(_product_imports(path)) for path in python_files("tests/helpers")
    }
    found = {}
    for path in python_files(*_TESTS):
        if _is_test(path):
            used = {name.rpartition(".")[0] for name, _ in imported_modules(path)}
            through = (helpers[name] for name in used & helpers.keys())
            found[relative(path)] = frozenset(_product_imports(path)).union(*through)
    return found


def _product_imports(path: Path) -> Iterator[str]:
    modules = _modules()
    for name, _ in imported_modules(path):
        if name in modules:
            yield name
        elif (parent := name.rpartition(".")[0]) in modules:
            yield parent
