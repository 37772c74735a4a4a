"""`megatrain blackbox`: the table and the JSON of a black box."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.commands import blackbox
from megatrain.config.recording import TelemetryConfig
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import ControlPage
from megatrain.contracts.errors import DataError
from megatrain.run_files.run_directory import own_box_directory
from tests.unit.telemetry.conftest import Boxed

Print = Callable[..., str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Print:
    """Return a function that runs the command and returns its output."""

    def run(*arguments: str | Path) -> str:
        parser = argparse.ArgumentParser()
        blackbox.add_arguments(parser)
        capsys.readouterr()
        assert blackbox.run(parser.parse_args([str(word) for word in arguments])) == 0
        return capsys.readouterr().out

    return run


def test_help_names_the_directory_of_black_boxes() -> None:
    parser = argparse.ArgumentParser()
    blackbox.add_arguments(parser)
    directory = own_box_directory(Path(TelemetryConfig().black_box_directory))
    assert f"{directory}/megatrain.*.blackbox" in " ".join(parser.format_help().split())


@pytest.fixture
def hung(boxed: Callable[..., Boxed]) -> Boxed:
    """A rank that has completed step 3 and hangs in an all-reduce of step 4."""
    box = boxed()
    recorder = box.recorder
    tp = recorder.add_group("tp", [2, 3])
    recorder.set_step(3)
    for microbatch in range(3):
        with recorder.span(Operation.FORWARD_COMPUTE, microbatch=microbatch, chunk=1):
            pass
    recorder.complete_step()
    write_control(box.path, ControlPage(command_number=2, command=1, round=5))
    recorder.set_step(4)
    recorder.begin(Operation.TP_ALL_REDUCE, num_bytes=4096, group=tp)
    return box


def test_table_shows_the_rank_and_its_open_exchange(hung: Boxed, show: Print) -> None:
    text = show(hung.path)
    assert "rank      2 of 4  (pp 1/2, dp 0/1, tp 0/2)" in text
    assert "running" in text
    assert "step for" in text
    assert "step 4, completed 3" in text
    assert "round 5, command 1 (number 2), all operations" in text
    assert "group 1   tp: ranks 2, 3; entered 1, left 0" in text
    assert "step 3 by operation:" in text
    lines = text.splitlines()
    header = next(line for line in lines if "time_ms" in line)
    hanging = lines[-1]
    assert hanging.index("tp-all-reduce") == header.index("operation")
    assert hanging.split()[1:6] == ["4", "tp-all-reduce", "4096", "tp", "1"]
    assert "IN FLIGHT for" in hanging
    assert sum("forward-compute" in line for line in lines) == 4, "three spans and a total"


def test_records_are_filtered(hung: Boxed, show: Print) -> None:
    def records(*arguments: str) -> list[Any]:
        return [
            (record["operation"], record["microbatch"])
            for record in json.loads(show(hung.path, "--json", *arguments))["records"]
        ]

    forward = [("forward-compute", microbatch) for microbatch in range(3)]
    assert records() == [*forward, ("tp-all-reduce", -1)]
    assert records("--last", "2") == [forward[-1], ("tp-all-reduce", -1)]
    assert records("--in-flight") == [("tp-all-reduce", -1)]
    assert records("--operation", "forward-compute", "--last", "2") == forward[1:]
    assert "no records" in show(hung.path, "--operation", "gc")


def test_json_is_stable(hung: Boxed, show: Print) -> None:
    document = json.loads(show(hung.path, "--json"))
    assert list(document) == [
        *("schema_version", "file", "identity", "clock", "state", "is_running", "ended_ns", "now_ns", "capacity"),
        *("num_recorded", "num_torn", "progress", "control", "groups", "last_step_totals", "records"),
    ]
    assert document["schema_version"] == 1
    assert document["identity"]["coordinate"] == {"dp": 0, "pp": 1, "tp": 0}
    assert document["identity"]["layout"] == {"tp_size": 2, "pp_size": 2, "dp_size": 1}
    assert document["progress"]["phase"] == "step"
    assert document["groups"][0]["name"] == "tp"
    assert document["last_step_totals"][0]["count"] == 3
    record = document["records"][-1]
    assert set(record) == {
        *("operation", "sequence", "start_ns", "duration_ns", "launch_ns", "num_bytes", "step", "collective_sequence"),
        *("microbatch", "chunk", "operation_number", "group", "flags", "group_name", "age_ns"),
    }
    assert record["duration_ns"] is None
    assert record["age_ns"] > 0
    assert (record["group_name"], record["flags"]) == ("tp", [])
    assert document["records"][0]["age_ns"] is None


def test_a_dead_rank_is_not_called_running(hung: Boxed, show: Print) -> None:
    hung.recorder.close(keep=True, has_failed=True)
    assert ", failed" in show(hung.path)
    document = json.loads(show(hung.path, "--json"))
    assert (document["state"], document["is_running"]) == ("failed", False)
    # The age of open spans is measured up to the last sign of life, not up to now.
    assert document["now_ns"] == document["ended_ns"]


def test_bad_arguments_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    blackbox.add_arguments(parser)
    for arguments in (["f", "--last", "0"], ["f", "--last", "x"], ["f", "--operation", "forward"], []):
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
    errors = capsys.readouterr().err
    assert "argument --last: '0' is not a whole number of at least 1" in errors
    assert "argument --last: 'x' is not a whole number of at least 1" in errors
    (tmp_path / "log").write_text("not a black box\n" * 500)
    with pytest.raises(DataError, match="this is not a black box"):
        blackbox.run(parser.parse_args([str(tmp_path / "log")]))
