"""The profiler records the chosen steps of the chosen ranks, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatrain.config.recording import ProfileConfig
from megatrain.training.observers.profiler import StepProfiler
from tests.helpers.completed_steps import completed_step


def run_steps(profiler: StepProfiler, num_steps: int) -> list[str]:
    notes = []
    for index in range(num_steps):
        profiler.before_step(index)
        torch.ones(3).cos()
        notes.append(profiler.after_step(completed_step(index)))
    return notes


def test_the_chosen_steps_are_written_once(tmp_path: Path) -> None:
    with StepProfiler(ProfileConfig(ranks=(1,), first_step=1, num_steps=2), 1, tmp_path) as profiler:
        notes = run_steps(profiler, 4)
    path = tmp_path / "profile" / "rank-00001.json"
    assert notes == ["", "", f"profile.first_step=1, profile.num_steps=2: the trace is {path}", ""]
    events = json.loads(path.read_text())["traceEvents"]
    shapes = [event["args"].get("Input Dims") for event in events if event.get("name") == "aten::cos"]
    assert shapes == [[[3]], [[3]]], "once a step, with its shapes"


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with StepProfiler(ProfileConfig(ranks=(0,), first_step=0, num_steps=1), 1, tmp_path) as profiler:
        assert run_steps(profiler, 2) == ["", ""]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_early_keeps_what_it_has(tmp_path: Path) -> None:
    with StepProfiler(ProfileConfig(ranks=(0,), first_step=1, num_steps=5), 0, tmp_path) as profiler:
        run_steps(profiler, 3)
    assert (tmp_path / "profile" / "rank-00000.json").stat().st_size > 0
