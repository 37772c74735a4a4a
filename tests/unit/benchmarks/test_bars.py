"""Benchmarks: limits and pages, rows of data reading and loaders, the state of a checkpoint, figures of jitter."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import data_reading, host_loader
from benchmarks import result as results
from benchmarks.bars import as_written, at_least, at_most, must_hold
from benchmarks.checkpoint_state import KINDS, build_state
from benchmarks.data_reading import CASES
from benchmarks.data_reading_sides import OURS, PEER
from benchmarks.host_loader import LAYOUTS
from benchmarks.jitter import figures
from benchmarks.memory import with_changes
from benchmarks.result import RESULTS, MissingPartError, Result
from benchmarks.summary import BEGIN, END, summary, write_summary
from megatrain.comm import dry_mesh
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.parallel.boxes import Box
from tests.helpers.require import require


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


def test_state_of_all_ranks_is_the_whole_state_once() -> None:
    """Each value is saved by one rank; its other holders have it too."""
    layout = Layout(dp_size=2, tp_size=2)
    config = Config.from_dict(with_changes({"model.hidden_size": 32, "model.vocab_size": 64, "parallel.tp_size": 2}))
    boxes: dict[tuple[str, str], list[Box]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(layout.world_size):
        with dry_mesh(layout, rank) as mesh:
            state = build_state(config, mesh, bucket_size=5_000)
        assert state.is_filled()
        for one in state.shards:
            shapes[one.shard.name] = one.shard.global_shape
            if one.shard.holders.index == 0:
                boxes[one.kind, one.shard.name].append(one.shard.box)

    assert boxes.keys() == {(kind, name) for kind in KINDS for name in shapes}
    for (_, name), found in boxes.items():
        assert len(set(found)) == len(found), name
        assert sum(box.numel for box in found) == math.prod(shapes[name]), name


@pytest.mark.slow
def test_data_reading_measures_both_sides_in_each_case() -> None:
    require("megatron-core", find_spec("megatron") is not None, "its data set is the peer")
    result = data_reading.run(million_tokens=0.3, num_rounds=1, round_samples=64)
    found = [(row["side"], row["documents"] == "yes", row["batch"]) for row in result.rows]
    assert found == [(side, case.has_documents, case.micro_batch_size) for side in (OURS, PEER) for case in CASES[side]]
    assert all(row["samples/s"] > 0 and row["cpu us"] > 0 and row["ratio"] > 0 for row in result.rows)
    assert [bar.bar for bar in result.bars] == [">= 2"] * len(CASES[OURS])
    assert result.settings["tokens"] == 300_000


@pytest.mark.slow
def test_host_loader_measures_each_layout_and_a_kill() -> None:
    result = host_loader.run(million_documents=0.06, num_sources=3, num_steps=10)
    assert [row["case"] for row in result.rows] == [*LAYOUTS, "8 replicas, loader killed"]
    assert all(row["same stream"] == "yes" and row["loader MB"] > 0 for row in result.rows)
    # on a slow machine, the loader may be a step behind
    assert all(row["read / used"] == pytest.approx(1.0, abs=0.5) for row in result.rows)
    assert [bar.bar for bar in result.bars] == ["<= 2", "<= 300", "<= 1.1", "<= 1.1", "<= 0.5", "yes", "<= 0.01", "yes"]
    assert [bar.found for bar in result.bars if bar.bar == "yes"] == [True, True]


def test_only_frequent_pauses_raise_the_99th_percentile() -> None:
    for every, is_seen in ((50, True), (1000, False)):
        found = figures([0.5 if step % every == every - 1 else 0.1 for step in range(1000)])
        assert found["steps"] == 1000
        assert found["p50 ms"] == pytest.approx(100.0)
        assert found["p99 / p50"] == pytest.approx(5.0 if is_seen else 1.0), every
        assert found["longest ms"] == pytest.approx(500.0)
