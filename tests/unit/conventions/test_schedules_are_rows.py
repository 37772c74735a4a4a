"""A rule about a schedule is in its row (megatrain/schedule/kinds.py): no other code compares a schedule's name."""

from __future__ import annotations

import ast
import re
from typing import get_args, get_type_hints

from megatrain.config.parallel import ParallelConfig
from megatrain.schedule import SCHEDULE_NAMES, ScheduleName
from tests.helpers.source_tree import naming, nodes, python_files, relative

ALLOWED = {
    "megatrain/config/parallel.py": "the default of the option",
    "megatrain/config/checks/kernels.py": "recorded micro-batches hold the order of 1f1b on one stage",
    "megatrain/config/checks/parallel.py": "a hint names a schedule that has no such needs",
}
"""File -> the reason why it names one."""
_SET = re.compile(rf'schedule="({"|".join(SCHEDULE_NAMES)})"')


def test_no_other_module_names_a_schedule() -> None:
    found = {
        relative(path)
        for path in naming(python_files("megatrain", "launcher", "diagnostics"), *SCHEDULE_NAMES)
        if not relative(path).startswith("megatrain/schedule/")
        for node in nodes(path, ast.Constant)
        if isinstance(node.value, str) and _names_one(node.value)
    }
    assert found == set(ALLOWED)


def _names_one(text: str) -> bool:
    """Return whether a text is the name of a schedule or an option with it; prose may use the names."""
    return text in SCHEDULE_NAMES or _SET.search(text) is not None


def test_the_options_values_are_the_rows() -> None:
    assert get_type_hints(ParallelConfig)["schedule"] == ScheduleName
    assert get_args(ScheduleName) == SCHEDULE_NAMES
