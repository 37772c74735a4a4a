"""A benchmark fails beyond its limit, and its page and the table of all benchmarks show it."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import result as results
from benchmarks.bars import as_written, at_least, at_most, must_hold
from benchmarks.result import RESULTS, MissingPartError, Result
from benchmarks.summary import BEGIN, END, summary, write_summary


def test_bars_are_met_up_to_their_limit() -> None:
    met = [at_most("a", 1.0, 1.0), at_least("a", 1.0, 1.0), must_hold("a", True), *as_written("a", 1.3, "<= 1.3")]
    missed = [
        at_most("a", 1.1, 1.0), at_most("a", math.nan, 1.0), at_least("a", 0.9, 1.0), at_least("a", math.nan, 1.0),
        must_hold("a", False), *as_written("a", 1.31, "<= 1.3"), *as_written("a", 0.79, ">= 0.8"),
    ]  # fmt: skip
    assert [bar for bar in met if not bar.is_met or bar.row()["met"] != "yes"] == []
    assert [bar for bar in missed if bar.is_met or bar.row()["met"] != "no"] == []
    assert (len(met), len(missed)) == (4, 7)
    assert as_written("a", 5.0, "") == as_written("a", 5.0, "-") == [], "a figure without a bar"


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_command_fails_beyond_a_bar_and_pages_name_it(
    ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    bars = [at_most("the ratio", ratio, 1), must_hold("the losses are equal", True)]
    result = Result("made", "Made", "command", [{"figure": 1}], ["a note"], bars)
    monkeypatch.setattr(command, "NAMES", ("made",))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setitem(sys.modules, "benchmarks.made", SimpleNamespace(run=lambda: result))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "made", "--write"])

    is_missed = ratio > 1
    assert command.main() == is_missed
    assert ("BEYOND THE BAR: the ratio: 2, where <= 1 is required" in capsys.readouterr().out) is is_missed
    row = f"the ratio | {ratio:g} | <= 1 | {'no' if is_missed else 'yes'} |"
    assert row in (tmp_path / "made.md").read_text()
    assert json.loads((tmp_path / "made.json").read_text())["bars"] == [bar.row() for bar in bars]
    table = readme.read_text()
    assert table.startswith(f"before\n{BEGIN}\n| benchmark |")
    assert table.endswith(f"|\n{END}\nafter\n")
    assert (row in table) is is_missed


@pytest.mark.parametrize("requirement", ["", "all", "dali"])
def test_benchmark_without_its_part_is_skipped_unless_required(
    requirement: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> Result:
        raise MissingPartError("dali", "NVIDIA DALI is not installed")

    monkeypatch.setattr(command, "NAMES", ("made",))
    monkeypatch.setitem(sys.modules, "benchmarks.made", SimpleNamespace(run=run))
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    monkeypatch.setenv("MEGATRAIN_REQUIRE", requirement)
    must_run = requirement == "dali"
    assert command.main() == must_run
    why = "required by MEGATRAIN_REQUIRE" if must_run else "skipped"
    assert capsys.readouterr().out == f"\nmade: {why}: NVIDIA DALI is not installed\n"


def test_the_committed_table_follows_from_the_committed_results(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(RESULTS, tmp_path / "benchmarks"))
    write_summary(copy)
    assert (copy / "README.md").read_text() == (RESULTS / "README.md").read_text()


def test_the_table_of_all_benchmarks_names_each_missed_bar() -> None:
    bars = at_most("a", 2, 1), at_least("b", 4, 1), at_least("c", 3, 1), must_hold("d", True), at_most("e", 0, 0.5)
    rows = [bar.row() for bar in bars]
    record = {"name": "made", "date": "2026-11-28", "bars": rows}
    assert summary([record, {**record, "name": "free", "bars": []}]).splitlines()[2:] == [
        "| [made](made.md) | 2026-11-28 | a | 2 | <= 1 | no |",
        "| [made](made.md) | 2026-11-28 | c (the closest of 4) | 3 | >= 1 | yes |",
        "| [free](free.md) | 2026-11-28 | no bar |  |  |  |",
    ]
