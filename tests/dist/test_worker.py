"""A worker from start to end, as the command runs it: it trains on its configuration and writes its results."""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch import distributed as dist

from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import Process
from megatrain.run_files.run_directory import RunDirectory
from megatrain.telemetry.recorder import Recorder
from megatrain.training.worker import run_worker
from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.black_boxes import boxes_by_rank, recording_in, spans_by_step
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.training_case import make_config, on_layout

STEPS = 3


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a worker."""

    exit_code: ExitCode
    is_joined: bool
    graces: list[float]
    printed: str


def work(context: RankContext, config: Config) -> Ended:
    """Run as a worker without a signal; its black box stays, as after a failure."""
    rank, world_size = context.rank, context.world_size
    process = Process(rank, world_size, rank, world_size, 0, context.init_method)
    graces: list[float] = []
    signals: Any = SimpleNamespace(is_requested=False, name="")
    watchdog: Any = SimpleNamespace(extend=graces.append, follow=lambda path: None)
    close, printed = Recorder.close, io.StringIO()

    def close_and_keep(self: Recorder, *, keep: bool = False, has_failed: bool = False) -> None:
        close(self, keep=True, has_failed=has_failed)

    with mock.patch.object(Recorder, "close", close_and_keep), contextlib.redirect_stdout(printed):
        exit_code = run_worker(config, process, signals, watchdog)
    return Ended(exit_code, dist.is_initialized(), graces, printed.getvalue())


@pytest.fixture(scope="module")
def config(all_data: Tables, tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("worker")
    (root / "boxes").mkdir()
    return make_config(
        all_data,
        on_layout(1, 2, 1, 2),
        {"data": {"seed": 5, "has_document_mask": True}},
        {"train": {"steps": STEPS, "gc_interval": 1}, "checkpoint": {"save_at_end": True}},
        {"runtime": {"checkpoint_timeout_s": 31.0, "evaluation_timeout_s": 32.0}},
        {"job": {"run_directory": str(root / "run")}},
        recording_in(root / "boxes"),
    )


@pytest.fixture(scope="module")
def ended(config: Config, rank_pool: RankPool) -> list[Ended]:
    return rank_pool.run(work, 2, config)


def metrics(config: Config, kind: str) -> list[dict[str, Any]]:
    path = RunDirectory(Path(config.job.run_directory)).metrics / "metrics.jsonl"
    return [record for record in map(json.loads, path.read_text().splitlines()) if record["kind"] == kind]


@pytest.mark.slow
def test_worker_trains_on_the_configured_data(
    config: Config, ended: list[Ended], jobs: TrainingJobs, all_data: Tables
) -> None:
    data = {"seed": 5, "has_document_mask": True}
    same = jobs.run(make_config(all_data, on_layout(1, 2, 1, 2), {"train": {"steps": STEPS}}, {"data": data}))

    assert [record["loss"] for record in metrics(config, "step")] == same.losses
    assert [record["loss"] for record in metrics(config, "evaluation")] == [same.evaluation.loss]


def test_worker_leaves_the_group_and_exits_with_ok(ended: list[Ended]) -> None:
    assert [one.exit_code for one in ended] == [ExitCode.OK, ExitCode.OK]
    assert [one.is_joined for one in ended] == [False, False]


def test_watchdog_gets_the_limit_of_each_phase(ended: list[Ended]) -> None:
    for one in ended:
        # restore, snapshot, evaluation, wait for storage
        assert one.graces == [31.0, 0.0, 31.0, 0.0, 32.0, 0.0, 31.0, 0.0]


def test_only_rank_0_prints_directory_cores_and_steps(config: Config, ended: list[Ended]) -> None:
    first, other = (one.printed for one in ended)
    assert f"run directory {config.job.run_directory}; " in first
    assert "cores of rank 0: not bound to cores, 1 thread\n" in first
    assert f"step {STEPS}/{STEPS}" in first
    assert other == ""


def test_config_is_written_to_the_run_directory(config: Config, ended: list[Ended]) -> None:
    kept = tomllib.loads((Path(config.job.run_directory) / "config.toml").read_text())
    assert Config.from_dict(kept) == config


def test_worker_records_collections_and_wrap_links(config: Config, ended: list[Ended]) -> None:
    boxes = boxes_by_rank(Path(config.telemetry.black_box_directory))
    assert sorted(boxes) == [0, 1]
    for box in boxes.values():
        assert spans_by_step(box, Operation.GC) == dict.fromkeys(range(STEPS), 1)
        assert spans_by_step(box, Operation.INIT) == {-1: 1}
        # Two stages and two chunks: the link from the last stage to the first is separate.
        assert {"pp-forward-wrap", "pp-backward-wrap"} <= {group.name for group in box.groups.values()}
        assert not [span for span in box.in_flight if span.group]
