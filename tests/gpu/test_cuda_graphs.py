"""Micro-batches that are replayed from CUDA graphs train as those that Python launches, on one GPU with compiled
kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.ops.extension import load_extension
from megatrain.parallel.graphed_chunk import CudaGraphCapture, Replay
from megatrain.schedule import ChunkPlacement, build_schedule, forward_only
from megatrain.training.step import train_step
from tests.helpers.require import require
from tests.helpers.single_rank import SilentRecorder, make_config, microbatches, random_tokens, single_rank_model

STEPS = 8
TOLERANCE = 1e-3
"""The relative tolerance. The kernels are the same; a library may choose another kernel for a matrix product
elsewhere."""
SIZES: dict[str, Any] = {"vocab_size": 500, "seq_len": 64, "hidden_size": 64, "num_heads": 4, "num_layers": 3}
LLAMA: dict[str, Any] = SIZES | {
    "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False,
    "num_kv_heads": 2,
}  # fmt: skip
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt": {"model": SIZES | {"dropout": 0.1}},
    "llama": {"model": LLAMA},
    "window": {"model": LLAMA | {"window_size": 20}},
    "selective recompute": {"model": LLAMA, "parallel": {"recompute": "selective"}},
    "full recompute": {"model": LLAMA | {"dropout": 0.1}, "parallel": {"recompute": "full"}},
    "fp8 current": {"model": LLAMA, "fp8": {"recipe": "tensorwise"}},
    "fp8 delayed": {"model": LLAMA, "fp8": {"recipe": "tensorwise", "scaling": "delayed", "history_len": 3}},
    "fp8 by row": {"model": LLAMA, "fp8": {"recipe": "rowwise"}},
}


class CountedCapture(CudaGraphCapture):
    """Counts the replays of all recordings."""

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0

    def capture(self, work: Any) -> Replay:
        replay = super().capture(work)

        def counted() -> None:
            self.num_replays += 1
            replay()

        return counted


@pytest.fixture(autouse=True)
def _gpu() -> None:
    require("gpu", torch.cuda.is_available(), "torch.cuda.is_available() is false on this machine")
    extension = load_extension()
    require("compiler", extension.is_active, extension.reason)


def train(capture: CudaGraphCapture | None, tables: dict[str, dict[str, Any]]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step; an evaluation takes place halfway."""
    config = make_config(
        batch={"micro_batch_size": 2, "global_batch_size": 6}, train={"steps": STEPS, "precision": "bf16", "seed": 7},
        **tables,
    )  # fmt: skip
    rank_model = single_rank_model(config, "cuda", capture)
    found = []
    for number in range(STEPS):
        inputs = microbatches(rank_model, random_tokens(config, seed=number % 2), first_sample=6 * number)
        if number == STEPS // 2:
            rank_model.set_training(False)
            rank_model.pipeline.evaluate(forward_only(ChunkPlacement(1, 1), len(inputs)), inputs)
            rank_model.set_training(True)
        outcome = train_step(
            rank_model, build_schedule("1f1b", 1, 1, 3), inputs, num_label_tokens=6 * config.model.seq_len, lr=1e-3,
            grad_clip=1.0, recorder=SilentRecorder(),
        )  # fmt: skip
        found.append((outcome.loss, outcome.grad_norm))
    return found


@pytest.mark.parametrize("case", CASES)
def test_replayed_training_is_training(case: str) -> None:
    capability = torch.cuda.get_device_capability()
    require("gpu", "fp8" not in case or capability >= (9, 0), f"no FP8 on compute capability {capability}")
    capture = CountedCapture()
    replayed, plain = train(capture, CASES[case]), train(None, CASES[case])

    for found, expected in zip(replayed, plain, strict=True):
        assert found == pytest.approx(expected, rel=TOLERANCE)
    assert replayed[-1][0] < replayed[0][0]
    first = 4 if "delayed" in case else 3  # the step that records
    assert capture.num_replays == 2 * 3 * (STEPS - first + 1)
