"""Whole steps of the GPU benchmark, without a GPU: sides that fit or do not fit into memory, and losses that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_step, gpu_step_stages, gpu_target
from benchmarks.gpu_record import GpuRecord
from benchmarks.gpu_step import measure, model_config, our_config

TINY = {"hidden_size": 64, "ffn_size": 96, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 128}


@pytest.fixture
def _cuda_stand_in(monkeypatch: pytest.MonkeyPatch, _usable: None) -> None:
    for name, value in {
        "reset_peak_memory_stats": None, "synchronize": None, "memory_reserved": 3 << 30,
        "max_memory_allocated": 2 << 30, "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_properties": SimpleNamespace(total_memory=85_000_000_000),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(gpu_step_stages, "profiled_idle", lambda *_: 0.25)


@pytest.mark.usefixtures("_cuda_stand_in")
def test_a_measured_side_has_its_figures() -> None:
    config = our_config(model_config(1, seq_len=32, **TINY))
    figures = measure(gpu_target.gpu(), lambda tokens: float(tokens.sum()), config, torch.ones(33, 1), peak_flops=1e12)

    assert figures.losses == (33.0,) * gpu_step.STEPS
    assert (figures.peak_gib, figures.held_gib, figures.growth_gib) == (2.0, 3.0, 0.0)
    assert figures.tokens_per_s == pytest.approx(32 / figures.seconds)


class StandInTrainer:
    """Steps that take no time, for sides that do or do not fit."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1

    def step(self, tokens_SB: Tensor) -> float:
        return 1.0


@pytest.mark.usefixtures("_cuda_stand_in")
def test_only_a_side_that_does_not_fit_is_repeated(record: GpuRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = StandInTrainer()

    def our_side(config: Any, device: torch.device) -> tuple[Callable[[Tensor], float], StandInTrainer]:
        if config.fp8.recipe == "tensorwise":
            raise ValueError("no such product")
        return trainer.step, trainer

    def peer(model: dict[str, Any], device: torch.device, wrap: object) -> Callable[[Tensor], float]:
        if model["num_layers"] > 7:
            raise RuntimeError("backend failed") from torch.OutOfMemoryError("CUDA out of memory")
        return trainer.step

    monkeypatch.setattr(gpu_step_stages, "our_step", our_side)
    monkeypatch.setattr(gpu_step_stages, "peer_step", peer)
    stage = record.stage("Whole steps")
    gpu_step_stages.whole_steps(stage, gpu_target.gpu())

    rows = stage.content["found"]
    assert [(row["side"], row["layers"], row["micro-batches"]) for row in rows] == [
        ("ours, bf16", 10, 1), ("ours, FP8 current", 10, 1), ("plain torch, compiled", 10, 1),
        ("plain torch, compiled", 8, 1), ("plain torch, compiled", 7, 1),
        ("ours, bf16", 8, 8), ("ours, FP8 current", 8, 8), ("plain torch, compiled", 8, 8),
        ("plain torch, compiled", 7, 8),
    ]  # fmt: skip
    compared = [isinstance(row["mfu / ours, bf16"], float) for row in rows]
    assert compared == [True, False, False, False, True, True, False, False, True]
    assert rows[2]["seconds"] == "out of memory: backend failed"
    assert rows[0]["idle"] == 0.25
    assert stage.content["failed"] == ["ours, FP8 current, seconds: ValueError: no such product"] * 2
    assert trainer.num_closed == 2


@pytest.mark.usefixtures("_usable")
@pytest.mark.parametrize(
    ("on_gpu", "is_failed"), [(5.05, False), (5.2, True), (float("nan"), True), (0.0, True)], ids=str
)
def test_losses_that_differ_are_a_failure(
    on_gpu: float, is_failed: bool, record: GpuRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = gpu_step_stages.PARITY_STEPS

    def our_side(config: Any, device: torch.device) -> tuple[Callable[[Tensor], float], StandInTrainer]:
        losses = iter([5.0] * (num_steps - 1) + [on_gpu if device.type == "cuda" else 5.0])
        return lambda _: next(losses), StandInTrainer()

    monkeypatch.setattr(gpu_step_stages, "our_step", our_side)
    stage = record.stage("Parity")
    gpu_step_stages.parity(stage, gpu_target.gpu())

    assert bool(stage.content["failed"]) == is_failed
    assert GpuRecord.read(tmp_path).stage("Parity").content["found"]["cpu"] == [5.0] * num_steps


@pytest.mark.usefixtures("_cuda_stand_in")
def test_a_host_bound_side_that_fails_leaves_the_other(record: GpuRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = StandInTrainer()

    def our_side(config: Any, device: torch.device) -> tuple[Callable[[Tensor], float], StandInTrainer]:
        if not config.kernels.cuda_graphs:
            raise ValueError("broken")
        return trainer.step, trainer

    monkeypatch.setattr(gpu_step_stages, "our_step", our_side)
    stage = record.stage("125M")
    gpu_step_stages.host_bound_steps(stage, gpu_target.gpu())

    broken, whole = stage.content["found"]
    assert (broken["seconds"], broken["idle"]) == ("ValueError: broken",) * 2
    assert isinstance(whole["seconds"], float)
    assert whole["idle"] == 0.25
    assert whole["seconds / launched by Python"] == ""
