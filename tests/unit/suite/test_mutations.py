"""The mutations that show whether tests detect faults: what can be changed, what is drawn, and what counts as lost."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.helpers.importers import files_that_test
from tests.helpers.mutation_sites import mutated, mutations_of
from tests.helpers.source_tree import ROOT
from tests.mutate import (
    NUM_DAYS,
    Drawn,
    MutationOutcome,
    all_mutations,
    by_package,
    draw,
    failed_test,
    found_again,
    left_to_run,
    lost_outcomes,
    package_of,
    part_of,
    read_outcomes,
    run_all,
    write_outcomes,
)

CHANGES = {
    "a == b": {"(a != b)"},
    "x = a < b": {"x = (a <= b)"},
    "x = a in b": {"x = (a not in b)"},
    "x = a + b": {"x = (a - b)"},
    "x = a // b": {"x = (a * b)"},
    "x = '\u00e9' + a": set(),
    "x = a and b": {"x = (a or b)"},
    "x = True": {"x = False"},
    "x = 3": {"x = 4"},
    "x = 0.5": {"x = 1.5"},
    "x: Literal[3] = None": set(),
    "x = f'{a + b}'": set(),
    "x = a if b else c": {"x = a if (not b) else c"},
    "do(a)": {"pass"},
    "_logger.info(a)": set(),
    '"""A docstring."""': set(),
    "if a: x = b": {"if (not a): x = b"},
    "def f() -> int:\n    return a": {"def f() -> int:\n    return None"},
    "def f():\n    return None": set(),
    "x = \u00e9(a * b)": {"x = \u00e9((a + b))"},
}


def test_a_file_has_these_mutations() -> None:
    assert {source: {mutated(source, mutation) for mutation in mutations_of(source)} for source in CHANGES} == CHANGES


def test_a_mutation_of_another_text_is_refused() -> None:
    (mutation,) = mutations_of("x = 3")
    with pytest.raises(ValueError, match="line 1 does not have '3'"):
        mutated("y = 12", mutation)


def test_mutations_cover_packages_and_follow_the_seed() -> None:
    sources = {
        "megatrain/a/one.py": "x = 1\ny = 2\n",
        "megatrain/a/deep/two.py": "x = 1\n",
        "launcher/megatrain_launcher/b/three.py": "x = 1\ny = 2\nz = 3\n",
    }
    mutations = all_mutations(sources)
    drawn = draw(mutations, 4, 0)
    assert sorted(package_of(one.path) for one in drawn) == ["launcher/megatrain_launcher/b"] * 2 + ["megatrain/a"] * 2
    assert draw(mutations[::-1], 4, 0) == drawn
    assert len(set(draw(mutations, 100, 1))) == 6
    assert draw(mutations, 6, 1) != draw(mutations, 6, 0)


def test_draw_and_outcomes_follow_mutations_to_other_lines() -> None:
    path, text = "megatrain/a/one.py", "".join(f"x{number} = {number}\n" for number in range(20)) + "y = 7\n"
    before = draw(all_mutations({path: text}), 20, 0)
    after = all_mutations({path: "# a comment\n" + text.replace("x5 = 5", "x5 = None")})
    lines = [one.mutation.line + 1 for one in before if one.mutation.before != "5"]
    assert [one.mutation.line for one in draw(after, 19, 0)][: len(lines)] == lines
    found = found_again([MutationOutcome(one, "a test") for one in before], after)
    assert [(one.drawn.mutation.line, one.found_by) for one in found] == [(line, "a test") for line in lines]
    assert {one.drawn for one in found} <= set(after)


@pytest.mark.slow
def test_each_mutation_is_alone_in_its_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "megatrain/contracts/layout.py"
    source = (ROOT / path).read_text()
    drawn = [Drawn(path, mutation) for mutation in mutations_of(source)[:3]]
    seen = []

    def run_tests(one: Drawn, tree: Path) -> str:
        seen.append((tree / path).read_text() == mutated(source, one.mutation))
        return "a test" if one is drawn[1] else ""

    assert [one.found_by for one in run_all(drawn, run_tests)] == ["", "a test", ""]
    assert seen == [True] * 3
    assert (ROOT / path).read_text() == source


def test_mutation_that_is_no_longer_found_is_lost() -> None:
    first, second = all_mutations({"megatrain/a/one.py": "x = 1\ny = 2\n"})
    before = [MutationOutcome(first, "a test"), MutationOutcome(second, "")]
    assert lost_outcomes(before, [MutationOutcome(first, "another test"), MutationOutcome(second, "")]) == []
    now = [MutationOutcome(first, ""), MutationOutcome(second, "a test")]
    assert lost_outcomes(before, now) == [MutationOutcome(first, "")]
    assert left_to_run([first, second], now[1:]) == [first]


def test_rows_count_outcomes_by_package_and_verdict(tmp_path: Path) -> None:
    drawn = all_mutations({"megatrain/a/one.py": "x = 1\ny = 2\n", "megatrain/ab/two.py": "x = 1\ny = 2\n"})
    results = tmp_path / "results.jsonl"
    judged = zip(drawn, ("", "", "a test", ""), ("slow: a test", "gap: none", "", ""), strict=True)
    outcomes = [MutationOutcome(*one) for one in judged]
    write_outcomes(results, outcomes)
    assert read_outcomes(results) == outcomes
    assert by_package(outcomes)[-1] == {
        "package": "all",
        "mutations": 4,
        "detected": 1,
        "harmless": 0,
        "slow": 1,
        "gap": 1,
    }
    assert [row["mutations"] for row in by_package(outcomes)] == [2, 2, 4]


@pytest.mark.slow
def test_a_module_has_tests_of_its_importers_and_its_package() -> None:
    assert files_that_test(ROOT / "megatrain/contracts/layout.py")[0] == "tests/unit/contracts/test_layout.py"
    assert "tests/unit/ops/test_normalization.py" in files_that_test(ROOT / "megatrain/ops/normalization.py")
    # a command, which is found by its name
    command = ROOT / "diagnostics/megatrain_diagnostics/commands/logs_classify.py"
    assert "tests/unit/job/failures/test_logs_command.py" in files_that_test(command)
    assert "tests/unit/hf/test_hf_config_keys.py" in files_that_test(ROOT / "megatrain/hf/rope.py")


FAILURES = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("no - [way]")

def test_plain():
    assert not "a - [b]"

def test_with_an_error(broken):
    pass

class TestGroup:
    def test_method(self):
        assert False

@pytest.mark.parametrize("text", ["tp2-pp2", "a b", "a - b", "[x]", "a::b", "x" * 200])
def test_cases(text):
    raise ValueError("[a] - b")
"""
RECORDER = """
def pytest_runtest_logreport(report):
    if report.failed:
        with open("failed", "a") as file:
            print(report.nodeid, file=file)
"""


def test_failed_tests_have_the_names_that_pytest_gives(tmp_path: Path) -> None:
    """A file that cannot be imported has no test to repeat."""
    (tmp_path / "conftest.py").write_text(RECORDER)
    (tmp_path / "test_failures.py").write_text(FAILURES)
    (tmp_path / "test_unreadable.py").write_text("import no_such_module")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--rootdir=.", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--continue-on-collection-errors"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    names = [failed_test(line) for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    expected = (tmp_path / "failed").read_text().splitlines()
    assert len(expected) == 9
    assert sorted(names) == sorted([*expected, ""]), done.stdout


def test_every_part_has_its_day() -> None:
    first = date(2026, 11, 28)
    parts = [part_of("today", first + timedelta(days=number)) for number in range(NUM_DAYS)]
    assert sorted(parts) == [(number, NUM_DAYS) for number in range(1, NUM_DAYS + 1)]
    assert part_of("3/20") == (3, 20)
    for text in ("0/20", "21/20", "3", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match="neither K/N"):
            part_of(text)
