"""The code of models and operations neither imports nor names any part of parallelism."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from tests.helpers.source_tree import imported_modules, nodes, python_files, relative

PURE = [*python_files("megatrain/model"), *python_files("megatrain/ops")]
FOREIGN_MODULES = (
    "torch.distributed",
    "megatrain.comm",
    "megatrain.parallel",
    "megatrain.optim",
    "megatrain.telemetry",
)
FOREIGN_WORDS = re.compile(
    r"dist|distributed|collective|process_?group|all_?reduce|all_?gather|reduce_?scatter|comm|mesh|tp|pp|dp"
    r"|(tp|pp|dp|world)_(size|rank)|rank"
)


NAMED = (ast.Name, ast.Attribute, ast.arg, ast.alias, ast.Constant)


def foreign_names(named: Iterable[ast.AST]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for node in named:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                found += [(name, node.lineno) for part in name.lower().split(".") if FOREIGN_WORDS.fullmatch(part)]
            case ast.Constant(value=str(text)) if FOREIGN_WORDS.fullmatch(text):
                found.append((text, node.lineno))
    return found


def test_pure_sources_and_foreign_names_are_found() -> None:
    names = {relative(path) for path in PURE}

    assert {"megatrain/model/transformer.py", "megatrain/ops/cross_entropy.py"} <= names
    assert foreign_names(
        ast.walk(ast.parse("from torch import distributed as d\nx.all_reduce(y)\ndef f(tp_size): ...\n"))
    )


def test_no_parallelism_is_imported_or_named() -> None:
    imported = [
        f"{relative(path)}:{line}: {module}"
        for path in PURE
        for module, line in imported_modules(path)
        if module.startswith(FOREIGN_MODULES)
    ]
    named = [f"{relative(path)}:{line}: {name}" for path in PURE for name, line in foreign_names(nodes(path, *NAMED))]
    assert not imported
    assert not named
