"""Waits end at the shared deadline, and no assertion compares real time with a constant."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.source_tree import ROOT, nodes, python_files, relative

SHARED = {"DEADLINE_S", "PATIENCE"}
OPTIONS = {"timeout", "timeout_s", "deadline", "deadline_s"}
LONGEST_PAUSE_S = 0.05
"""A shorter wait is a pause between two checks."""
WAITS = {"communicate", "join", "next", "poll", "result", "settimeout", "wait"}
"""Methods whose last argument by position may be a limit."""
LIMIT_WORDS = ("DEADLINE", "PATIENCE", "TIMEOUT")
SPELLED = re.compile(
    rf"\b(?:{'|'.join(sorted(OPTIONS))})\s*=|(?<![\"'])\.(?:{'|'.join(sorted(WAITS))})\(|\bDeadline\("
    rf"|(?i:{'|'.join(LIMIT_WORDS)})\w*\s*[:=]"
)
"""The text of every limit of a wait contains one of these; joining strings is not a wait."""

EXCEPTIONS = {
    "tests/conftest.py": "pytest's own limit of a test, which this file multiplies by the patience",
    "tests/dist/test_group_creation.py": "the limit of a rank that waits for one that never comes",
    "tests/dist/test_group_stores.py": "the limit of ranks that wait for one that never comes",
    "tests/dist/test_overlapped_communication.py": "an exchange that takes its time",
    "tests/dist/test_rank_pool.py": "the limit of a stuck rank",
    "tests/faults/ranks/test_cut_link.py": "the step timeout of a job whose link is cut",
    "tests/golden/flight_recorder/make_dumps.py": "no test: writes the dumps of ranks that time out",
    "tests/helpers/canned_dashboard.py": "a server that closes idle connections",
    "tests/run.py": "a number of repetitions",
    "tests/unit/checkpoint/test_offline_writer.py": "a right writer waits until the limit",
    "tests/unit/comm/test_nccl.py": "the limits that a group must pass on, and one of a rank that never comes",
    "tests/unit/dashboard/test_dashboard_sources.py": "the limit of a query without an end",
    "tests/unit/diagnostics/test_streamer_stacks.py": "a thread that never goes on",
    "tests/unit/job/coordination/test_etcd_watch.py": "the limit of a watch that receives nothing",
    "tests/unit/launcher/test_health_pairs.py": "a task whose probe is a stand-in",
    "tests/unit/launcher/test_health_speed.py": "the limit of a probe that never ends",
    "tests/unit/launcher/test_notify_delivery.py": "the limits of a receiver that does not answer",
    "tests/unit/programs/test_stop_signals.py": "signals end the waits of its programs, whose parent has the deadline",
    "tests/unit/training/test_watchdog.py": "a worker that never ends, and the limit passes",
}
"""Files in which a number limits a wait, and the reason: the test is about the limit, or no process waits."""


def is_number(node: ast.AST) -> bool:
    """Return whether an expression contains a number that may be a limit, and is not a shared one."""
    parts = list(ast.walk(node))
    if any(isinstance(part, ast.Name | ast.Attribute) and SHARED & {_name(part)} for part in parts):
        return False
    numbers = (part.value for part in parts if isinstance(part, ast.Constant))
    return any(isinstance(one, int | float) and one > LONGEST_PAUSE_S and one is not True for one in numbers)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _plain(node: ast.AST) -> bool:
    """Return whether an expression is a number, computed from numbers, or a timedelta of one."""
    match node:
        case ast.Call():
            return _name(node.func) == "timedelta" and is_number(node)
        case ast.Constant() | ast.BinOp():
            return is_number(node)
    return False


def own_limits(tree: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines where a number limits a wait: as an option, as an argument, or under the name of a limit."""
    for node in tree:
        match node:
            case ast.Call(func=function, args=arguments, keywords=options):
                by_name = [one.value for one in options if one.arg in OPTIONS]
                is_wait = (isinstance(function, ast.Attribute) and function.attr in WAITS) or _name(
                    function
                ) == "Deadline"
                if any(map(_plain, by_name)) or (is_wait and arguments and _plain(arguments[-1])):
                    yield node.lineno
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if any(word in name.upper() for word in LIMIT_WORDS):
                # A time of the real clock plus a number is a limit too.
                is_moment = isinstance(value, ast.BinOp) and is_number(value)
                if _plain(value) or is_moment:
                    yield node.lineno


def programs_in(path: Path) -> Iterator[ast.AST]:
    """Yield the syntax trees of programs that a file contains as text."""
    for text in nodes(path, ast.Constant):
        if isinstance(text.value, str) and "import " in text.value and "\n" in text.value:
            try:
                yield from ast.walk(ast.parse(text.value))
            except SyntaxError:
                continue


def may_limit(path: Path) -> bool:
    """Return whether a file may limit a wait: its text contains such a call, option or name."""
    return SPELLED.search(path.read_text(encoding="utf-8")) is not None


def files_with_own_limits() -> dict[str, list[int]]:
    found = {}
    for path in filter(may_limit, python_files("tests")):
        lines = [*own_limits(nodes(path, ast.Call, ast.Assign, ast.AnnAssign)), *own_limits(programs_in(path))]
        if lines:
            found[relative(path)] = lines
    return found


def test_waits_end_at_the_shared_deadline() -> None:
    found = files_with_own_limits()
    places = [f"{name}:{line}" for name in sorted(set(found) - set(EXCEPTIONS)) for line in found[name]]
    assert not places, f"use tests.helpers.waiting.DEADLINE_S, or give a reason here: {', '.join(places)}"
    assert set(EXCEPTIONS) <= set(found), sorted(set(EXCEPTIONS) - set(found))


@pytest.mark.parametrize(
    ("line", "is_bad"),
    [
        ("process.wait(timeout=20)", True),
        ("thread.join(5.0)", True),
        ("watch.next(2 * 5.0)", True),
        ("store.wait(keys, timedelta(seconds=5))", True),
        ("LONG_TIMEOUT = timedelta(minutes=1)", True),
        ("deadline = time.monotonic() + 20", True),
        ("process.wait(2 * DEADLINE_S)", False),
        ("wait_until(is_over, 'the end', deadline_s=3 * waiting.DEADLINE_S)", False),
        ("watch.next(0.0)", False),
        ("', '.join(words)", False),
        ("job = make_job(commit_timeout_s=0.1)", False),
    ],
)
def test_numbers_that_limit_a_wait_are_found(line: str, is_bad: bool) -> None:
    assert bool(list(own_limits(ast.walk(ast.parse(line))))) is is_bad


def test_exceptions_name_files() -> None:
    assert [name for name in EXCEPTIONS if not (ROOT / name).is_file()] == []


CLOCKS = {f"{name}{unit}" for name in ("monotonic", "perf_counter", "process_time", "time") for unit in ("", "_ns")}

ASSERTION_EXCEPTIONS = {
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
    places = [f"{name}:{line}" for name in sorted(set(found) - set(ASSERTION_EXCEPTIONS)) for line in found[name]]
    assert not places, f"pass a clock to the tested code, or count its work: {', '.join(places)}"
    assert set(ASSERTION_EXCEPTIONS) <= set(found), sorted(set(ASSERTION_EXCEPTIONS) - set(found))


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
