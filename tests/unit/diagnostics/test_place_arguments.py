"""Arguments of `megatrain diag` subcommands: the place of the events, rounds, steps and ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.contracts.errors import DataError, NotFoundError, UsageError
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.commands.arguments import (
    add_json,
    add_ranks,
    add_round,
    add_run,
    add_steps,
    chosen_round,
    open_source,
    report_problems,
)
from megatrain_diagnostics.events.tables import Ranks, StepTotals, columns_of, from_columns, num_rows
from megatrain_diagnostics.store.segment_store import SegmentStore
from tests.helpers.stored_events import segment_paths, step_totals
from tests.helpers.synthetic_steps import SyntheticJob


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
            columns = {name: ["h"] if dtype == "text" else [round_number] for name, dtype in columns_of(Ranks).items()}
            store.append(Ranks, to_arrow(from_columns(Ranks, columns)))
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
    with pytest.raises(NotFoundError, match="--round=2: demo has 3, 4"):
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

    assert main(["diag", "stragglers", "demo"]) != 0

    errors = capsys.readouterr().err
    assert errors.index("not a whole Parquet file") < errors.index("has no sums of steps")
