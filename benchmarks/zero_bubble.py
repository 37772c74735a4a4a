"""How long each stage of a pipeline idles under 1f1b and zero_bubble: 4 ranks on gloo, both schedules in turn, paced.

Forward, dgrad and wgrad run the true numerics on tiny tensors and then wait until a stated duration is over, like a GPU
that leaves the host free. Without that, more ranks than cores would measure only the operating system's scheduler. The
benchmark measures the runtime: messages, their order, and the waits of each stage.
Run: python -m benchmarks zero_bubble [--write]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from benchmarks.bars import at_most
from benchmarks.memory import random_inputs
from benchmarks.result import Result
from megatrain.comm import leave
from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.schedule import ComputeDurations, bubble_fraction, build_schedule
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from megatrain.training.rank_model import build_rank_model
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.paced_train import pause_until
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext

STAGES, MICROBATCHES = 4, 8
ROUNDS = 10
UNIT_S = 0.05
"""The seconds of a forward."""
SCHEDULES = ("1f1b", "zero_bubble")
DURATIONS = {
    "equal": ComputeDurations(1.0, 1.0, 1.0),
    # attention has no weights, so dgrad is longer than wgrad
    "with attention": ComputeDurations(1.0, 1.25, 0.75),
}
"""Durations in units of UNIT_S."""
_TABLES: dict[str, dict[str, Any]] = {
    "model": {"vocab_size": 64, "seq_len": 16, "hidden_size": 32, "num_layers": STAGES, "num_heads": 2},
    "parallel": {"pp_size": STAGES, "dp_size": 1, "schedule": "zero_bubble"},
    "batch": {"micro_batch_size": 1, "global_batch_size": MICROBATCHES},
    "train": {"steps": 1, "precision": "fp32"},
    "optimizer": {"lr": 1e-3},
    "runtime": {"device": "cpu"},
}
IDLE_BAR = 0.03
"""The bar for the idle fraction above the closed form, which ignores the time of messages."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The times of one stage in one step, on the machine's monotonic clock."""

    begin_s: float
    end_s: float
    busy_s: float


class PacedSpans:
    """Replaces the pipeline's recorder. A span lasts for the stated duration of its compute."""

    def __init__(self, durations_s: Mapping[Operation, float]) -> None:
        self._durations_s = durations_s
        self.busy_s = 0.0

    @contextmanager
    def span(self, operation: Operation, *, microbatch: int, chunk: int) -> Iterator[None]:
        begin = time.monotonic()
        yield
        pause_until(begin + self._durations_s[operation])
        self.busy_s += time.monotonic() - begin


def run() -> Result:
    """Measure steps of each schedule for each set of durations."""
    with RankPool(size=STAGES) as pool:
        rows = [row for name in DURATIONS for row in _measure(pool, name)]
    return Result(
        name="zero-bubble",
        title="Idle part of a step by stage, 1f1b and zero_bubble (paced)",
        command="python -m benchmarks zero_bubble --write",
        rows=rows,
        notes=[
            "idle: 1 - busy time of the stage / time from the start of the first stage to the end of the last one",
            f"median of {ROUNDS} steps after one to warm up, the schedules taking turns",
            "closed form: bubble_fraction / (1 + bubble_fraction), that is with messages that take no time",
            "compute is paced, messages are real (gloo over loopback, 2 KiB); on a GPU: not measured",
        ],
        settings={"stages": STAGES, "microbatches": MICROBATCHES, "forward, s": UNIT_S},
        bars=[
            at_most(
                f"{row['durations']}, stage {row['stage']}: idle under zero_bubble above its closed form",
                row["zero_bubble, idle"] - row["zero_bubble, closed form"],
                IDLE_BAR,
            )
            for row in rows
        ],
    )


def _measure(pool: RankPool, name: str) -> list[dict[str, Any]]:
    durations = DURATIONS[name]
    # a pass of 1f1b is the longest: (micro-batches + stages - 1) computes of all three kinds
    longest_s = (MICROBATCHES + STAGES) * durations.total * UNIT_S
    timeout_s = 60.0 + 4.0 * longest_s * len(SCHEDULES) * ROUNDS
    of_stage = pool.run(measure_stage, STAGES, durations, timeout_s=timeout_s)
    found: list[dict[str, Any]] = [{"durations": name, "stage": stage} for stage in range(STAGES)]
    for schedule in SCHEDULES:
        idle, steps_s = _idle_parts([passes[schedule] for passes in of_stage])
        bubble = bubble_fraction(schedule, STAGES, 1, MICROBATCHES, durations)
        for stage, row in enumerate(found):
            row[f"{schedule}, idle"] = idle[stage]
            row[f"{schedule}, closed form"] = bubble / (1.0 + bubble)
            row[f"{schedule}, s a step"] = statistics.median(steps_s)
    return found


def _idle_parts(of_stage: list[list[Pass]]) -> tuple[list[float], list[float]]:
    """Return the median idle fraction of each stage, and the seconds of each step."""
    steps_s = [
        max(pass_.end_s for pass_ in passes) - min(pass_.begin_s for pass_ in passes)
        for passes in zip(*of_stage, strict=True)
    ]
    idle = [
        statistics.median(1.0 - pass_.busy_s / step_s for pass_, step_s in zip(passes, steps_s, strict=True))
        for passes in of_stage
    ]
    return idle, steps_s


def measure_stage(context: RankContext, durations: ComputeDurations) -> dict[str, list[Pass]]:
    """Run as one stage: steps of both schedules in turn, the first of each as a warm-up."""
    config, recorder = Config.from_dict(_TABLES), Recorder(BlackBoxWriter.anonymous())
    mesh = joined_mesh(context, config.layout(context.world_size), recorder)
    rank_model = build_rank_model(config, mesh, recorder, mesh.device)
    rank_model.initialize()
    rank_model.set_training(True)
    inputs = random_inputs(rank_model)
    found: dict[str, list[Pass]] = {name: [] for name in SCHEDULES}
    for number in range(1 + ROUNDS):
        for name in SCHEDULES if number % 2 else reversed(SCHEDULES):
            spans = PacedSpans(_durations_s(durations, is_split=name == "zero_bubble"))
            rank_model.pipeline.recorder = cast(Recorder, spans)
            for chunk in rank_model.data_parallel:
                chunk.start_step()
            mesh.sum_over_all(torch.zeros(1, dtype=torch.float64))  # all stages begin together
            begin = time.monotonic()
            rank_model.pipeline.train(build_schedule(name, STAGES, 1, MICROBATCHES), inputs, lambda: torch.tensor(1.0))
            if number:
                found[name].append(Pass(begin, time.monotonic(), spans.busy_s))
            for chunk in rank_model.data_parallel:
                chunk.finish_reduce()
    leave()
    return found


def _durations_s(durations: ComputeDurations, *, is_split: bool) -> dict[Operation, float]:
    deferred = durations.wgrad
    backward = durations.dgrad + (0.0 if is_split else deferred)
    return {
        Operation.FORWARD_COMPUTE: durations.forward * UNIT_S,
        Operation.BACKWARD_COMPUTE: backward * UNIT_S,
        Operation.BACKWARD_WEIGHT_COMPUTE: deferred * UNIT_S,
    }
