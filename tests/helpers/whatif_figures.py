"""Compares figures with those of the public tool, at any level of nesting."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from megatrain.cli import main


def figures_printed(capsys: Any, *arguments: str) -> dict[str, Any]:
    """Return the output of `megatrain diag whatif ... --json`; the text itself is JSON that any reader accepts."""
    code = main(["diag", "whatif", *arguments, "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the output")

    return json.loads(printed.out, parse_constant=refuse)


def differences(expected: Any, found: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Yield each figure that is missing, additional, or differs by more than `tolerance`, relative."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in expected.keys() | found.keys():
            if name not in expected or name not in found:
                yield f"{path}/{name}: {'missing' if name not in found else 'not expected'}"
            else:
                yield from differences(expected[name], found[name], tolerance, f"{path}/{name}")
    elif isinstance(expected, int | float) and isinstance(found, int | float):
        if not math.isclose(expected, found, rel_tol=tolerance, abs_tol=1e-9):
            yield f"{path}: {found}, expected {expected}"
    elif expected != found:
        yield f"{path}: {found!r}, expected {expected!r}"


def count_figures(expected: Any) -> int:
    if isinstance(expected, dict):
        return sum(map(count_figures, expected.values()))
    return int(isinstance(expected, int | float))
