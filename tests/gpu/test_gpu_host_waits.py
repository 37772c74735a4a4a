"""The host waits for the GPU once in a step, according to CUDA's debug mode for synchronizations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatrain.schedule import build_schedule
from megatrain.training.step import train_step
from tests.helpers.require import require
from tests.helpers.single_rank import SilentRecorder, make_config, microbatches, random_tokens, single_rank_model

STEPS_BEFORE = 3
SIZES: dict[str, Any] = {"vocab_size": 500, "seq_len": 64, "hidden_size": 64, "num_heads": 4, "num_layers": 3}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {"model": SIZES | {"dropout": 0.1}},
    "lamb": {"model": SIZES, "optimizer": {"name": "lamb"}},
    "muon": {"model": SIZES | {"has_scaled_embedding": True}, "optimizer": {"name": "muon"}},
    "offload": {"model": SIZES, "parallel": {"offload_layers": 2}},
}


@pytest.fixture
def _warns_of_waits() -> Iterator[None]:
    require("gpu", torch.cuda.is_available(), "torch.cuda.is_available() is false on this machine")
    torch.cuda.set_sync_debug_mode("warn")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_warns_of_waits")
@pytest.mark.parametrize("tables", CASES.values(), ids=CASES)
def test_a_step_waits_once_for_the_gpu(tables: dict[str, dict[str, Any]]) -> None:
    config = make_config(train={"steps": 9, "precision": "bf16"}, **tables)
    rank_model = single_rank_model(config, "cuda")
    tokens, recorder = random_tokens(config, seed=0), SilentRecorder()
    for step in range(STEPS_BEFORE + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inputs = microbatches(rank_model, tokens, first_sample=4 * step)
            train_step(
                rank_model, build_schedule("1f1b", 1, 1, len(inputs)), inputs, num_label_tokens=tokens[1:].numel(),
                lr=1e-3, grad_clip=1.0, recorder=recorder,
            )  # fmt: skip
    waits = [str(one.message) for one in caught if "synchronizing CUDA operation" in str(one.message)]

    assert len(waits) == 1
