"""No assertion compares real time with a constant: it would fail on a machine that is slow, busy, or fast."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.source_tree import nodes, python_files, relative

CLOCKS = {f"{name}{unit}" for name in ("monotonic", "perf_counter", "process_time", "time") for unit in ("", "_ns")}

EXCEPTIONS = {
    "tests/unit/diagnostics/test_streamer_loop.py": "moments, no durations: the tolerance is of the clocks' comparison",
    "tests/unit/job/coordination/test_follower.py": "of two durations, the one that began first is read last",
    "tests/unit/training/test_watchdog.py": "a grace period begins after the clock is read",
}
"""Files with a lower limit that every machine meets, and the reason."""


def is_reading(node: ast.AST, moments: set[str]) -> bool:
    """Return whether an expression is a reading of a clock, or a name for one."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=name)):
            return name in CLOCKS
        case ast.Call(func=ast.Name(id=name)):
            return name in CLOCKS - {"time"}
        case ast.Name(id=name):
            return name in moments
    return False


def is_length(node: ast.AST, moments: set[str], lengths: set[str]) -> bool:
    """Return whether an expression contains a duration between two moments, one of them read from a clock."""
    return any(
        (isinstance(part, ast.Name) and part.id in lengths)
        or (
            isinstance(part, ast.BinOp)
            and isinstance(part.op, ast.Sub)
            and any(is_reading(side, moments) for side in (part.left, part.right))
            and not isinstance(part.right, ast.Constant)
        )
        for part in ast.walk(node)
    )


def named_times(function: ast.AST) -> tuple[set[str], set[str]]:
    """Return a function's names of clock readings, and its names of durations, or of lists of them."""
    moments: set[str] = set()
    lengths: set[str] = set()
    for node in sorted(ast.walk(function), key=lambda one: getattr(one, "lineno", 0)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_reading(value, moments):
                moments.add(name)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value])
            ) if is_length(value, moments, lengths):
                lengths.add(name)
    return moments, lengths


def limited_times(functions: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines of assertions that a duration is shorter, or longer, than a value that was not read from a
    clock."""
    for function in functions:
        moments, lengths = named_times(function)
        for node in ast.walk(function):
            if not isinstance(node, ast.Assert):
                continue
            for compare in (part for part in ast.walk(node.test) if isinstance(part, ast.Compare)):
                sides = [compare.left, *compare.comparators]
                for left, operator, right in zip(sides, compare.ops, sides[1:], strict=False):
                    are_lengths = {is_length(side, moments, lengths) for side in (left, right)}
                    if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and len(are_lengths) == 2:
                        yield node.lineno


def reads_a_clock(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(f"{name}(" in text for name in CLOCKS)


def test_no_assertion_limits_real_time() -> None:
    found = {
        relative(path): lines
        for path in filter(reads_a_clock, python_files("tests"))
        if (lines := list(limited_times(nodes(path, ast.FunctionDef, ast.AsyncFunctionDef))))
    }
    places = [f"{name}:{line}" for name in sorted(set(found) - set(EXCEPTIONS)) for line in found[name]]
    assert not places, f"pass a clock to the tested code, or count its work: {', '.join(places)}"
    assert set(EXCEPTIONS) <= set(found), sorted(set(EXCEPTIONS) - set(found))


@pytest.mark.parametrize(
    ("body", "is_bad"),
    [
        ("assert time.monotonic() - began < LIMIT_S", True),
        ("a = perf_counter_ns()\n    go()\n    took = perf_counter_ns() - a\n    assert took / 1e9 <= 5, took", True),
        ("began = time.process_time()\n    assert time.process_time() - began > 0.01", True),
        ("began = monotonic()\n    assert 0.3 <= monotonic() - began", True),
        ("before = time.time()\n    assert before <= record.at_unix_s <= time.time()", False),
        ("while not reported():\n        assert time.monotonic() < deadline", False),
    ],
)
def test_assertions_that_limit_real_time_are_found(body: str, is_bad: bool) -> None:
    tree = ast.parse(f"def test_it():\n    {body}\n")

    assert bool(list(limited_times(tree.body))) is is_bad
