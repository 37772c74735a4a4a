"""The ranks of benchmark `checkpoint` that train while a writer brings a state to storage."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint_ranks import BUCKET_SIZE, BenchmarkPlaces, all_together, join_ranks, open_job
from benchmarks.checkpoint_state import build_state
from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint.job import JobCheckpoints
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.parallel.pipeline import PipelineInput
from megatrain.schedule import build_schedule
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step import Requests, train_step
from tests.helpers.rank_protocol import RankContext

_LONGEST_BLOCK_S = 60.0
_STEP_SEQ_LEN, _STEP_BATCH = 128, 4
_STEP_TABLES: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 2048, "seq_len": _STEP_SEQ_LEN, "hidden_size": 256, "num_layers": 4, "num_heads": 4},
    "parallel": {"dp_size": 2},
    "batch": {"micro_batch_size": _STEP_BATCH, "global_batch_size": 2 * _STEP_BATCH},
    "train": {"steps": 1, "precision": "fp32"},
    "optimizer": {"lr": 1e-4},
    "runtime": {"device": "cpu", "threads": 1},
}


@dataclass(frozen=True, slots=True)
class SaveStepFigures:
    """Mean seconds of a step, one value for each block; the first block is the warm-up.

    A block of `alone` has as many steps as the newest block of `beside` before it.
    """

    beside: list[float]
    alone: list[float]
    num_steps: list[int]
    """The number of steps of each block."""
    stage_2_s: list[float]
    """The seconds from the seal until rank 0 knew that the checkpoint is stored, cut off after a time limit."""
    num_unfinished: int
    """The number of blocks that ended before storage had the checkpoint."""


def measure_steps(
    context: RankContext, tables: dict[str, Any], num_rounds: int, places: BenchmarkPlaces
) -> SaveStepFigures:
    """Train with the real step on two ranks, with and without a writer that brings a state to storage meanwhile."""
    mesh, config = join_ranks(context, tables, places)
    state = build_state(config, mesh, BUCKET_SIZE)
    checkpoints = open_job(config, mesh, state, places)
    checkpoints.restore()
    steps = _Steps(mesh)
    figures = SaveStepFigures([], [], [], [], 0)
    num_unfinished = 0
    for number in range(num_rounds + 1):
        step = number + 1
        num_steps = figures.num_steps[-1] if figures.num_steps else 0
        if number % 2:
            with all_together():
                figures.alone.append(steps.run(num_steps))
        with all_together():
            checkpoints.take(TrainingProgress(step=step, num_updates=step))
        taken = time.perf_counter()
        num_steps, seconds, is_stored = steps.run_until_news(checkpoints)
        figures.stage_2_s.append(time.perf_counter() - taken)
        figures.beside.append(seconds)
        figures.num_steps.append(num_steps)
        num_unfinished += not is_stored
        checkpoints.wait(step)
        if number % 2 == 0:
            with all_together():
                figures.alone.append(steps.run(num_steps))
    dist.barrier()
    checkpoints.close(is_done=True)
    return replace(figures, num_unfinished=num_unfinished)


class _Steps:
    """The trainer's step on a small model, with ZeRO over two ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._recorder = Recorder(BlackBoxWriter.anonymous())
        config = Config.from_dict(_STEP_TABLES)
        self._rank_model: RankModel = build_rank_model(config, mesh, self._recorder, mesh.device)
        self._rank_model.initialize()
        self._rank_model.set_training(True)
        shape = (_STEP_SEQ_LEN, _STEP_BATCH)
        tokens, labels = torch.randint(2048, shape), torch.randint(2048, shape)
        self._inputs: list[PipelineInput] = [
            self._rank_model.pipeline_input(tokens, labels, torch.arange(_STEP_BATCH), None)
        ]
        self.run(5)

    def run(self, num_steps: int) -> float:
        """Train `num_steps` steps and return the mean seconds of one."""
        started = time.perf_counter()
        for _ in range(num_steps):
            self._step(is_over=False)
        return (time.perf_counter() - started) / max(num_steps, 1)

    def run_until_news(self, checkpoints: JobCheckpoints) -> tuple[int, float, bool]:
        """Train until the checkpoint is stored; return the steps, the mean seconds of one, and whether it is stored."""
        started = time.perf_counter()
        num_steps, is_stored, is_over = 0, False, False
        while not is_over:
            is_stored = bool(checkpoints.new_messages()) or is_stored
            is_late = time.perf_counter() - started > _LONGEST_BLOCK_S
            is_over = self._step(is_over=is_stored or is_late)
            num_steps += 1
        return num_steps, (time.perf_counter() - started) / num_steps, is_stored

    def _step(self, *, is_over: bool) -> bool:
        """Train one step; return whether any rank has requested the end."""
        outcome = train_step(
            self._rank_model,
            build_schedule("1f1b", 1, 1, 1),
            self._inputs,
            num_label_tokens=_STEP_SEQ_LEN * _STEP_BATCH,
            lr=1e-4,
            grad_clip=1.0,
            requests=lambda: Requests(stop=is_over),
            recorder=self._recorder,
        )
        return outcome.agreed.stop
