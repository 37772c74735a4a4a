"""The sinks: lines of JSON across crashes and resumes, TensorBoard read back with its own reader, W&B by a double."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError
from megatrain.reporting import EvaluationReport, Reporter, SourceReport, StepReport, ValidationSetReport
from megatrain.reporting.jsonl_sink import JsonLinesSink
from megatrain.reporting.sinks import open_sinks
from megatrain.run_files.run_directory import RunDirectory
from tests.helpers.require import require_module

WEB = ValidationSetReport(name="web", loss=2.25, num_tokens=75, bits_per_byte=0.5)
CODE = ValidationSetReport(name="code", loss=math.nan, num_tokens=25, bits_per_byte=None)
EVALUATION = EvaluationReport(step=2, loss=2.5, num_tokens=100, bits_per_byte=None, duration_s=1.5, sets=(WEB, CODE))
SOURCES = (
    SourceReport(name="web", loss=2.25, num_tokens=75),
    SourceReport(name="code", loss=math.nan, num_tokens=25, num_replaced=3),
)
MakeStep = Callable[..., StepReport]


def test_a_line_holds_every_field(tmp_path: Path, make_step: MakeStep) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, unix_time=lambda: 1.5)
    sink.write(make_step(7, loss=math.nan, sources=SOURCES))

    # Read before close: no record is held back.
    assert json.loads(path.read_text()) == {
        "version": 1,
        "kind": "step",
        "unix_time_s": 1.5,
        "step": 7,
        "loss": None,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "duration_s": 2.0,
        "data_wait_s": 0.25,
        "num_tokens": 8000,
        "consumed_samples": 56,
        "consumed_tokens": 56000,
        "global_batch_size": 8,
        "is_skipped": False,
        "num_skipped": 0,
        "memory_bytes": 3 << 29,
        "world_size": 4,
        "num_replaced": 0,
        "num_pictures": 0,
        "sources": [
            {"name": "web", "loss": 2.25, "num_tokens": 75, "num_replaced": 0},
            {"name": "code", "loss": None, "num_tokens": 25, "num_replaced": 3},
        ],
    }
    sink.close()


def test_a_line_of_an_evaluation_holds_every_set(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, unix_time=lambda: 1.5)
    sink.write(EVALUATION)
    sink.close()

    assert json.loads(path.read_text()) == {
        "version": 1,
        "kind": "evaluation",
        "unix_time_s": 1.5,
        "step": 2,
        "loss": 2.5,
        "num_tokens": 100,
        "bits_per_byte": None,
        "duration_s": 1.5,
        "sets": [
            {"name": "web", "loss": 2.25, "num_tokens": 75, "bits_per_byte": 0.5},
            {"name": "code", "loss": None, "num_tokens": 25, "bits_per_byte": None},
        ],
    }


def test_a_resumed_run_appends(tmp_path: Path, make_step: MakeStep) -> None:
    path = tmp_path / "metrics.jsonl"
    for steps in ((1, 2, 3), (3, 4)):
        sink = JsonLinesSink(path)
        for step in steps:
            sink.write(make_step(step))
        sink.close()

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 3, 4]


def test_a_line_that_was_cut_off_does_not_corrupt_the_next(tmp_path: Path, make_step: MakeStep) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"version": 1, "kind": "st')
    sink = JsonLinesSink(path)
    sink.write(make_step(1))
    sink.write(make_step(2))
    sink.close()

    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines[1:]] == [1, 2]


def test_a_full_disk_damages_one_line_only(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        with pytest.raises(OSError, match="only 10 of"):
            sink.write(make_step(1))
    sink.write(make_step(2))
    sink.close()

    lines = path.read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1])["step"] == 2


def test_removed_metrics_are_created_again(tmp_path: Path, make_step: MakeStep) -> None:
    path, notes = tmp_path / "metrics" / "metrics.jsonl", []
    path.parent.mkdir()
    sink = JsonLinesSink(path, notes.append)
    sink.write(make_step(1))
    shutil.rmtree(path.parent)
    sink.write(make_step(2))
    path.unlink()
    path.parent.rmdir()
    path.parent.touch()  # It cannot be created again.
    with pytest.raises(OSError, match="exists"):
        sink.write(make_step(3))
    path.parent.unlink()
    sink.write(make_step(4))
    sink.close()

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [4]
    text = f"metrics: {path} was removed from outside; its records before step"
    assert notes == [f"{text} 2 are lost", f"{text} 4 are lost"]


def test_metrics_that_cannot_be_written_are_refused_at_the_start(
    make_config: Callable[..., Config], run_directory: RunDirectory
) -> None:
    (run_directory.metrics / "metrics.jsonl").mkdir()

    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be written: .*choose another job\.run_directory"):
        open_sinks(make_config(), run_directory, print)


def test_tensorboard_reads_what_was_written(
    make_reporter: Callable[..., Reporter], make_step: MakeStep, run_directory: RunDirectory
) -> None:
    accumulator = require_module("tensorboard.backend.event_processing.event_accumulator")
    for steps, loss in (((1, 2, 3), 3.0), ((2, 3), 1.0)):
        with make_reporter(log={"has_tensorboard": True}) as reporter:
            for step in steps:
                reporter.step(make_step(step, loss=loss, sources=SOURCES))
            reporter.evaluation(EVALUATION)

    # In the order of their names, which begin with the time; of two within a second, the later has the larger number.
    events = accumulator.EventAccumulator(str(run_directory.metrics / "tensorboard"))
    events.Reload()
    assert {"step/loss", "step/memory_bytes", "interval/tokens_per_s", "evaluation/loss"} <= set(
        events.Tags()["scalars"]
    )
    assert {tag for tag in events.Tags()["scalars"] if tag.startswith("evaluation/")} == {
        *(f"evaluation/{name}" for name in ("loss", "num_tokens", "duration_s")),
        *(f"evaluation/web/{name}" for name in ("loss", "num_tokens", "bits_per_byte")),
        *(f"evaluation/code/{name}" for name in ("loss", "num_tokens")),
    }
    assert events.Scalars("evaluation/web/loss")[-1].value == 2.25
    assert {tag for tag in events.Tags()["scalars"] if tag.count("/") == 2 and "evaluation" not in tag} == {
        f"{kind}/{source}/{name}"
        for kind in ("step", "interval")
        for source in ("web", "code") for name in ("loss", "num_tokens", "num_replaced")
    }  # fmt: skip
    assert events.Scalars("step/web/loss")[-1].value == events.Scalars("interval/web/loss")[-1].value == 2.25
    # The second start went back to step 2: TensorBoard hides the records of the first start beyond step 1.
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == [(1, 3.0), (2, 1.0), (3, 1.0)]


class FakeRun:
    """The result of wandb.init."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.is_finished = False
        self.error: Exception | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.logged.append(values)

    def finish(self) -> None:
        self.is_finished = True


class FakeWandb(ModuleType):
    """The part of wandb that the sink uses. `is_reachable` sets whether there is a network."""

    class Error(Exception):
        """wandb's own base class of errors."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = SimpleNamespace(name="wandb")  # type: ignore[assignment]
        self.Settings = SimpleNamespace
        self.is_reachable = True
        self.calls: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []

    def init(self, **settings: Any) -> FakeRun:
        self.calls.append(settings)
        if not self.is_reachable and settings.get("mode") != "offline":
            raise self.Error("no API key")
        (Path(settings["dir"]) / "wandb").mkdir(exist_ok=True)
        self.runs.append(FakeRun(settings["id"] or "fresh"))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delitem(sys.modules, "megatrain.reporting.wandb_sink", raising=False)
    yield fake
    # It contains the double.
    sys.modules.pop("megatrain.reporting.wandb_sink", None)


def test_wandb_gets_every_report(
    wandb: FakeWandb, make_reporter: Callable[..., Reporter], make_step: MakeStep, run_directory: RunDirectory
) -> None:
    with make_reporter(log={"has_wandb": True, "wandb_project": "llm", "interval": 2}, job={"name": "j"}) as reporter:
        reporter.step(make_step(1, loss=4.0, sources=SOURCES))
        reporter.evaluation(EVALUATION)

    call, run = wandb.calls[0], wandb.runs[0]
    assert (call["project"], call["name"], call["id"], call["dir"]) == ("llm", "j", None, str(run_directory.metrics))
    assert call["config"]["model"]["hidden_size"] == 64
    assert run.metrics == [("step", None), ("*", "step")]
    assert [record["step"] for record in run.logged] == [1, 1, 2]
    assert (run.logged[0]["step/loss"], run.logged[0]["step/web/loss"]) == (4.0, 2.25)
    assert "interval/tokens_per_s" in run.logged[1]
    assert (run.logged[2]["evaluation/loss"], run.logged[2]["evaluation/web/loss"]) == (2.5, 2.25)
    assert all(isinstance(value, int | float | None) for record in run.logged for value in record.values())
    assert run.is_finished


def test_a_run_directory_is_one_wandb_run(wandb: FakeWandb, make_reporter: Callable[..., Reporter]) -> None:
    for _ in range(2):
        make_reporter(log={"has_wandb": True}).close()

    assert [(call["id"], call["resume"]) for call in wandb.calls] == [(None, "allow"), ("fresh", "allow")]


def test_wandb_out_of_reach_is_kept_on_disk(
    wandb: FakeWandb, make_reporter: Callable[..., Reporter], make_step: MakeStep, stream: Any
) -> None:
    wandb.is_reachable = False
    with make_reporter(log={"has_wandb": True}) as reporter:
        reporter.step(make_step(1))

    assert [call.get("mode") for call in wandb.calls] == [None, "offline"]
    assert "Weights & Biases cannot be reached (no API key); metrics are kept in " in stream.getvalue()
    assert len(wandb.runs[0].logged) == 2


def test_removed_files_of_wandb_are_created_again(
    wandb: FakeWandb,
    make_reporter: Callable[..., Reporter],
    make_step: MakeStep,
    run_directory: RunDirectory,
    stream: Any,
) -> None:
    wandb.is_reachable = False
    with make_reporter(log={"has_wandb": True}) as reporter:
        reporter.step(make_step(1))
        shutil.rmtree(run_directory.metrics)
        reporter.step(make_step(2))
        reporter.step(make_step(3))

    assert (run_directory.metrics / "wandb").is_dir()
    assert (run_directory.metrics / "wandb-run-id").read_text() == "fresh\n"
    first, second = wandb.runs
    assert first.is_finished
    assert (second.id, [record["step"] for record in second.logged if "step/loss" in record]) == ("fresh", [2, 3])
    text = f"metrics: {run_directory.metrics / 'wandb'} was removed from outside; values before step"
    assert stream.getvalue().count(text) == 1


def test_an_error_of_wandb_does_not_stop_the_run(
    wandb: FakeWandb, make_reporter: Callable[..., Reporter], make_step: MakeStep, stream: Any
) -> None:
    with make_reporter(log={"has_wandb": True}) as reporter:
        wandb.runs[0].error = wandb.Error("gone")
        reporter.step(make_step(1))

    assert "metrics: Weights & Biases cannot be written (gone); training continues and retries" in stream.getvalue()


def test_a_missing_package_is_refused_at_the_start(
    make_reporter: Callable[..., Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.reporting.sinks.find_spec", lambda _: None)

    with pytest.raises(ConfigError, match=r"log\.has_wandb=true needs .* pip install 'megatrain\[wandb\]'"):
        make_reporter(log={"has_wandb": True})
