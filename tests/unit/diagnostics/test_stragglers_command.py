"""`megatrain diag stragglers` on a directory of segments, and the arguments that subcommands of `diag` share."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.cli import main
from megatrain.commands.argument_types import add_json
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import DataError, NotFoundError, UsageError
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis import stored_stragglers
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.commands.arguments import (
    add_ranks,
    add_round,
    add_run,
    add_steps,
    chosen_round,
    open_source,
    report_problems,
)
from megatrain_diagnostics.events.tables import Ranks, Spans, StepTotals, Values, columns_of, num_rows, select
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.stored_events import segment_paths, step_totals
from tests.helpers.synthetic_steps import SyntheticJob
from tests.helpers.table_rows import table_rows


def write(directory: Path, job: SyntheticJob, num_steps: int, slow_from: int = -1, silent: int = -1) -> None:
    with SegmentStore(directory) as store:
        store.append(Ranks, to_arrow(job.ranks()))
        for step in range(num_steps):
            if step == slow_from:
                job.compute_factor[2] = 1.3
            totals, values = job.step(step)
            store.append(StepTotals, to_arrow(select(totals, totals.rank != silent)))
            store.append(Values, to_arrow(values))
        store.commit()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["diag", "stragglers", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return document


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    write(run / "events", SyntheticJob(Layout(dp_size=4)), 60, slow_from=30)
    return run


def test_the_slow_host_is_named_with_figures_and_sentences(slow_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, str(slow_run))
    (finding,) = document["findings"]
    assert (finding["cause"], finding["confidence"], finding["hosts"]) == ("compute", "high", ["host-1"])
    assert finding["ranks"] == [2]
    assert finding["first_step"] == pytest.approx(30, abs=2)
    assert finding["last_step"] == 59
    assert finding["excess"] == pytest.approx(0.3, abs=0.06)
    assert finding["is_over"] is False
    assert document["num_steps"] == 58
    assert main(["diag", "stragglers", str(slow_run / "events")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("slow because of its compute: host-1, high confidence")
    assert "the others wait for it" in text
    assert re.search(r"^hosts +score host-1 [\d.]+ and host-0 0\.0$", text, re.MULTILINE)


def test_steps_before_the_slowness_have_no_finding(slow_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = printed(capsys, str(slow_run), "--steps", "0:28")
    assert document["findings"] == []
    assert document["is_enough"]
    assert main(["diag", "stragglers", str(slow_run), "--steps", ":28"]) == 0
    assert capsys.readouterr().out.startswith("no rank is slower than its peers")


def test_findings_do_not_depend_on_the_size_of_reads(
    slow_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (str(slow_run), "--steps", "20:45")
    at_once = printed(capsys, *arguments)
    assert at_once["findings"]
    monkeypatch.setattr(stored_stragglers, "_ROWS_AT_ONCE", 0)
    assert printed(capsys, *arguments) == at_once


def test_slowness_that_ended_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = SyntheticJob(Layout(dp_size=4), compute_factor={1: 1.4})
    with SegmentStore(tmp_path / "events") as store:
        store.append(Ranks, to_arrow(job.ranks()))
        for step in range(60):
            if step == 30:
                job.compute_factor.clear()
            totals, _ = job.step(step)
            store.append(StepTotals, to_arrow(totals))
        store.commit()
    (finding,) = printed(capsys, str(tmp_path))["findings"]
    assert finding["is_over"] is True
    assert finding["last_step"] == pytest.approx(32, abs=3)


@pytest.mark.slow(kept=["from the first-5000"])
@pytest.mark.parametrize("step", [2**31 - 1, 5000])
@pytest.mark.parametrize("arguments", [(), ("--steps", "0:")], ids=["newest", "from the first"])
def test_a_rank_that_reports_future_steps_hides_no_straggler(
    slow_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], step: int
) -> None:
    shutil.copytree(slow_run / "events", tmp_path / "events")
    with SegmentStore(tmp_path / "events") as store:
        totals, _ = SyntheticJob(Layout(dp_size=4), sequence=10**6).step(step)
        store.append(StepTotals, to_arrow(select(totals, totals.rank == 0)))
        store.commit()

    document = printed(capsys, str(tmp_path), *arguments)

    assert [one["hosts"] for one in document["findings"]] == [["host-1"]]
    assert document["last_step"] == 59


def test_few_steps_or_ranks_are_insufficient_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "few", SyntheticJob(Layout(dp_size=4)), 5)
    assert main(["diag", "stragglers", str(tmp_path / "few")]) == 0
    assert capsys.readouterr().out.startswith("insufficient evidence")
    write(tmp_path / "alone", SyntheticJob(Layout()), 40)
    document = printed(capsys, str(tmp_path / "alone"))
    assert document["ranks_without_peers"] == [0]
    assert not document["is_enough"]


def test_a_silent_rank_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, SyntheticJob(Layout(dp_size=4)), 30, silent=3)
    assert printed(capsys, str(tmp_path))["silent_ranks"] == [3]
    assert main(["diag", "stragglers", str(tmp_path)]) == 0
    assert "rank 3 sent no telemetry" in capsys.readouterr().out


def test_thresholds_can_be_chosen(slow_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, str(slow_run), "--excess", "0.5")["findings"] == []
    assert main(["diag", "stragglers", str(slow_run), "--excess", "nan"]) == 2
    assert "'nan' is not a number above 0" in capsys.readouterr().err


def test_whole_spans_distinguish_samples_from_a_slow_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without squared lengths, as of old runs: forward and backward of each micro-batch agree."""
    job = SyntheticJob(Layout(dp_size=4), compute_factor={2: 1.4})
    write(tmp_path / "slow", job, 40)
    assert printed(capsys, str(tmp_path / "slow"))["findings"][0]["cause"] == "compute"
    lengths = np.exp(0.4 * np.random.default_rng(3).normal(size=32))
    columns = {
        "round": 1, "rank": 2, "step": 20, "sequence": np.arange(64) + 10**6, "microbatch": np.tile(np.arange(32), 2),
        "operation": np.repeat([Operation.FORWARD_COMPUTE.number, Operation.BACKWARD_COMPUTE.number], 32),
        "duration_ns": (np.concatenate([lengths, 2 * lengths]) * 1e7).astype(int),
    }  # fmt: skip
    with SegmentStore(tmp_path / "slow") as store:
        store.append(Spans, to_arrow(table_rows(Spans, columns)))
        store.commit()
    assert printed(capsys, str(tmp_path / "slow"))["findings"][0]["cause"] == "sequence-length"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatrain diag test", exit_on_error=False)
    for add in (add_run, add_json, add_round, add_steps, add_ranks):
        add(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a run with two rounds, in ./runs/demo."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/demo")
    with SegmentStore(run / "events") as store:
        store.append(StepTotals, to_arrow(step_totals(range(2), range(2))))
        for round_number in (3, 4):
            columns = {name: round_number for name, dtype in columns_of(Ranks).items() if dtype != "text"}
            store.append(Ranks, to_arrow(table_rows(Ranks, columns)))
        store.commit()
    return run


def test_place_is_a_run_or_any_directory_of_segments(run: Path) -> None:
    for place in ("demo", "runs/demo", "runs/demo/", "runs/demo/events", "runs/demo/events/totals"):
        assert num_rows(open_source(parsed(place)).read(StepTotals)) == 12, place


def test_place_without_events_is_an_error(run: Path) -> None:
    (run / "logs").mkdir()
    with pytest.raises(NotFoundError, match=r"'nowhere': no such directory, nor a run runs/nowhere"):
        open_source(parsed("nowhere"))
    with pytest.raises(DataError, match="no segments of events below it"):
        open_source(parsed("runs/demo/logs"))


def test_place_may_be_omitted_for_the_only_run(run: Path) -> None:
    assert num_rows(open_source(parsed()).read(StepTotals)) == 12
    (run.parent / "other" / "events").mkdir(parents=True)
    with pytest.raises(UsageError, match="no run is named, and there are runs/demo and runs/other; name one of them"):
        open_source(parsed())


def test_place_cannot_be_omitted_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError, match="no run is named, and there is none below runs/"):
        open_source(parsed())


def test_round_is_the_newest_or_the_one_that_is_named(run: Path) -> None:
    source = open_source(parsed("demo"))

    assert chosen_round(parsed("demo"), source) == 4
    assert chosen_round(parsed("demo", "--round", "3"), source) == 3
    with pytest.raises(NotFoundError, match="--round=2: the rounds of demo are 3, 4"):
        chosen_round(parsed("demo", "--round", "2"), source)
    with pytest.raises(DataError, match="no rank has sent anything"):
        chosen_round(parsed("runs/demo/events/totals"), open_source(parsed("runs/demo/events/totals")))


def test_steps_and_ranks_are_parsed() -> None:
    for text, expected in (
        ("10:20", (10, 20)), ("10:", (10, None)), (":20", (None, 20)), ("15", (15, 15)), (":", (None, None)),
    ):  # fmt: skip
        assert parsed("x", "--steps", text).steps == expected, text
    assert parsed("x").steps == (None, None)
    assert parsed("x").ranks is None
    assert parsed("x", "--ranks", "5").ranks == (5,)
    assert parsed("x", "--ranks", "0:3,16, 2:4").ranks == (0, 1, 2, 3, 4, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "20:10"], "'20:10' ends before it begins"),
        (["--steps", "a"], "'a' is not a whole number"),
        (["--steps", "1:2:3"], "'2:3' is not a whole number"),
        (["--ranks", "4:1"], "'4:1' ends before it begins"),
        (["--ranks", ""], "'' is not a whole number"),
        (["--ranks", "0:2000000000"], "names more than 1,000,000 ranks"),
        (["--round", "-1"], "'-1' is not a whole number of at least 0"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message):
        parsed("x", *arguments)


def test_problems_are_reported_on_stderr(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment_paths(run / "events" / "totals")[0].write_bytes(b"\x1b[31m")
    args = parsed("demo")
    open_source(args).read(StepTotals)

    report_problems(args)
    report_problems(args)

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("megatrain: runs/demo/events/totals/")
    assert captured.err.count("not a whole Parquet file") == 1
    assert captured.err.isascii()


def test_problems_are_reported_before_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SegmentStore(run / "events") as store:
        store.append(Ranks, to_arrow(SyntheticJob(Layout(dp_size=2), round=5).ranks()))
        store.commit()
    segment_paths(run / "events" / "totals")[0].write_bytes(b"garbage")

    assert main(["diag", "stragglers", "demo", "--steps", ":0"]) != 0

    errors = capsys.readouterr().err
    assert errors.index("not a whole Parquet file") < errors.index("has no sums of steps between steps 0 and 0;")
