"""Training from captured graphs is bitwise the same as training. A stand-in for CUDA graphs replays the operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.config import Config
from megatrain.config.pictures import patch_width
from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.model import PatchRows
from megatrain.parallel.pipeline import PipelineInput
from megatrain.schedule import ChunkPlacement, build_schedule, forward_only
from megatrain.training.rank_model import RankModel
from megatrain.training.step import train_step
from tests.helpers.replayed_operations import ReplayedOperations
from tests.helpers.single_rank import (
    SilentRecorder,
    make_config,
    microbatches,
    parameters_by_name,
    random_tokens,
    single_rank_model,
)

STEPS = 7
Tables = dict[str, dict[str, Any]]
Between = Callable[[RankModel, int], None]
"""Called before each step, with its number from 0."""

LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False,
    "num_kv_heads": 2,
}  # fmt: skip
FP8: Tables = {
    "model": LLAMA | {"seq_len": 32, "hidden_size": 64, "num_heads": 4, "ffn_size": 96, "dropout": 0.1},
    "train": {"precision": "bf16"},
}
DELAYED: Tables = FP8 | {"fp8": {"recipe": "tensorwise", "scaling": "delayed", "history_len": 3}}
CASES: dict[str, Tables] = {
    "dropout": {"model": {"dropout": 0.2}},
    "tied head and z-loss": {"model": {"has_tied_head": True}, "train": {"z_loss": 1e-2, "label_smoothing": 0.1}},
    "llama": {"model": LLAMA},
    "llama, one query a key": {"model": LLAMA | {"num_kv_heads": 4}},
    # with a soft cap, because the CPU's kernels for windows check whether all keys are finite, which waits for a device
    "parallel block with a window": {
        "model": LLAMA | {"block": "parallel", "window_size": 3, "attention_softcap": 5.0}
    },
    "selective recompute": {"model": LLAMA | {"dropout": 0.1}, "parallel": {"recompute": "selective"}},
    "full recompute": {"model": LLAMA | {"dropout": 0.1}, "parallel": {"recompute": "full"}},
    "full recompute, gpt": {"model": {"dropout": 0.1}, "parallel": {"recompute": "full"}},
    "fp32": {"train": {"precision": "fp32"}},
    "bf16": {"model": LLAMA, "train": {"precision": "bf16"}},
    "gradients travel in bf16": {"train": {"precision": "bf16"}, "parallel": {"grad_reduce_dtype": "bf16"}},
    "lamb": {"optimizer": {"name": "lamb"}},
    "fp8 current": FP8 | {"fp8": {"recipe": "tensorwise"}},
    "fp8 current, selective": FP8 | {"fp8": {"recipe": "tensorwise"}, "parallel": {"recompute": "selective"}},
    "fp8 by row": FP8 | {"fp8": {"recipe": "rowwise"}},
}


@dataclass
class LossTrace:
    """The results of a run, to the bit: numbers as text, because NaN is not equal to itself."""

    losses: list[str]
    norms: list[str]
    skipped: list[bool]
    weights: dict[str, Tensor]

    def require_same(self, other: LossTrace) -> None:
        assert self.losses == other.losses
        assert self.norms == other.norms
        assert self.skipped == other.skipped
        for name, weight in self.weights.items():
            assert torch.equal(weight, other.weights[name]), name


def config_of(tables: Tables, num_microbatches: int) -> Config:
    batch = {"micro_batch_size": 2, "global_batch_size": 2 * num_microbatches}
    train: dict[str, Any] = {"steps": STEPS, "precision": "fp64", "seed": 7}
    return make_config(**tables | {"batch": batch, "train": train | tables.get("train", {})})


def run(
    config: Config, capture: ReplayedOperations | None = None, between: Between = lambda rank_model, number: None
) -> LossTrace:
    """Train for STEPS steps; each has other tokens, another number of labels and another learning rate."""
    rank_model = single_rank_model(config, capture=capture)
    trace = LossTrace([], [], [], {})
    for number in range(STEPS):
        between(rank_model, number)
        tokens = random_tokens(config, seed=number)
        inputs = microbatches(rank_model, tokens, first_sample=number * tokens.shape[1])
        inputs = [replace(one, labels_SB=one.labels_SB.clone()) for one in inputs]  # They shared memory with tokens.
        for one in inputs:
            one.labels_SB[: number % 3] = IGNORED_LABEL
        if config.model.has_pictures and number % 2:
            inputs = [with_picture(config, one) for one in inputs]
        schedule = build_schedule("1f1b", 1, 1, len(inputs))
        outcome = train_step(
            rank_model, schedule, inputs, num_label_tokens=sum(int((one.labels_SB >= 0).sum()) for one in inputs),
            lr=1e-2 / (1 + number), grad_clip=1.0,
            recorder=SilentRecorder(),
        )  # fmt: skip
        trace.losses.append(outcome.loss.hex())
        trace.norms.append(outcome.grad_norm.hex())
        trace.skipped.append(outcome.is_skipped)
    trace.weights = parameters_by_name(rank_model)
    return trace


def with_picture(config: Config, micro: PipelineInput) -> PipelineInput:
    """Return a micro-batch whose second sample has a picture."""
    model = config.model
    patches_P1C = micro.tokens_SB[: model.num_patches, :1, None].expand(-1, -1, patch_width(model)).to(torch.uint8)
    return replace(micro, context=replace(micro.context, pictures=PatchRows(patches_P1C, torch.tensor([1]))))


def require_same_training(config: Config, between: Between = lambda rank_model, number: None) -> list[int]:
    """Return how often each graph was replayed, forwards and backwards alternately."""
    capture = ReplayedOperations()
    run(config, capture, between).require_same(run(config, None, between))
    return capture.num_replays


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_replayed_training_is_bitwise_the_same(case: str) -> None:
    """One graph for the first micro-batch, whose gradients are fresh, and one for the two that add to them."""
    assert require_same_training(config_of(CASES[case], 3)) == [5, 5, 10, 10]


@pytest.mark.slow
def test_graphs_differ_by_the_number_of_pictures() -> None:
    """4 steps have no picture, and 3 have one; the first step of each kind is not captured."""
    model = {"picture_size": 4, "patch_size": 2, "encoder_num_layers": 1}

    assert require_same_training(config_of({"model": model}, 1)) == [3, 3, 2, 2]


@pytest.mark.slow(kept=["1"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_delayed_scales_are_recorded_once_they_are_there(num_microbatches: int) -> None:
    """The first step takes scales from tensors, which no recorded work may continue to do."""
    replays = require_same_training(config_of(DELAYED, num_microbatches))

    assert replays == ([4, 4] if num_microbatches == 1 else [4, 4, 8, 8])


@pytest.mark.slow
def test_steps_with_another_number_of_microbatches() -> None:
    """The batches ramp up: the recorded graphs are still used."""
    config = config_of({"model": {"dropout": 0.1}}, 3)
    capture = ReplayedOperations()
    traces = []
    for one in (capture, None):
        rank_model = single_rank_model(config, capture=one)
        losses = []
        for number, count in enumerate((1, 1, 1, 2, 2, 3, 1, 3)):
            inputs = microbatches(rank_model, random_tokens(config, seed=number, num_samples=2 * count))
            for chunk in rank_model.data_parallel:
                chunk.start_step()
            scale = torch.tensor(1.0 / (16 * count), dtype=torch.float64)
            schedule = build_schedule("1f1b", 1, 1, count)
            losses.append(rank_model.pipeline.train(schedule, inputs, lambda scale=scale: scale).total.item())
            for chunk in rank_model.data_parallel:
                chunk.finish_reduce()
            losses.append(rank_model.optimizer.gradient_square_sum().item())
            rank_model.optimizer.step(1e-2, 1.0)
        traces.append(losses)

    assert traces[0] == traces[1]
    assert capture.num_replays == [6, 6, 4, 4]


@pytest.mark.slow(kept=["dropout"])
@pytest.mark.parametrize("tables", [{"model": {"dropout": 0.3}}, DELAYED], ids=["dropout", "fp8"])
def test_evaluation_runs_beside_captured_graphs(tables: Tables) -> None:
    config = config_of(tables, 2)
    found: list[float] = []

    def evaluate(rank_model: RankModel, number: int) -> None:
        if number in (1, 3, 5):
            rank_model.set_training(False)
            inputs = microbatches(rank_model, random_tokens(config, seed=100 + number))
            found.append(rank_model.pipeline.evaluate(forward_only(ChunkPlacement(1, 1), len(inputs)), inputs).item())
            rank_model.set_training(True)

    replays = require_same_training(config, evaluate)
    assert found[:3] == found[3:]
    assert min(replays) == (4 if "fp8" in tables else 5)


def test_a_step_in_evaluation_mode_has_no_dropout() -> None:
    def switch(rank_model: RankModel, number: int) -> None:
        rank_model.set_training(number != 4)

    assert require_same_training(config_of({"model": {"dropout": 0.3}}, 1), switch) == [4, 4]


@pytest.mark.slow(kept=["plain-(4,)"])
@pytest.mark.parametrize("bad_steps", [(0, 1), (4,)], ids=str)
@pytest.mark.parametrize("tables", [{}, DELAYED], ids=["plain", "fp8"])
def test_a_skipped_step_leaves_no_trace(tables: Tables, bad_steps: tuple[int, ...]) -> None:
    """Its gradients are not finite; those of the next step overwrite them. Delayed scales are affected for a limited
    time."""
    config = config_of(tables, 2)
    kept: list[Tensor] = []

    def corrupt(rank_model: RankModel, number: int) -> None:
        (chunk,) = rank_model.pipeline.chunks
        weight = chunk.module.get_parameter("loss_head.norm.weight").data
        if number - 1 in bad_steps:
            weight.copy_(kept[-1])
        if number in bad_steps:
            kept.append(weight.clone())
            weight[0] = torch.inf

    replays = require_same_training(config, corrupt)
    trace = run(config, ReplayedOperations(), corrupt)
    assert trace.skipped == [number in bad_steps for number in range(STEPS)]
    assert min(replays) > 0


@pytest.mark.slow
@pytest.mark.parametrize("tables", [{}, {"train": {"precision": "bf16"}}, DELAYED], ids=["fp64", "bf16", "fp8"])
def test_captured_graphs_continue_with_a_loaded_state(tables: Tables) -> None:
    config = config_of(tables, 2)
    kept: dict[int, tuple[list[Tensor], int]] = {}

    def load(rank_model: RankModel, number: int) -> None:
        shards = [one.shard.tensor for one in rank_model.saved_shards()]
        if number == 1:
            kept[id(rank_model)] = [one.clone() for one in shards], rank_model.optimizer.num_updates
        elif number == 5:
            values, rank_model.optimizer.num_updates = kept[id(rank_model)]
            for shard, value in zip(shards, values, strict=True):
                shard.copy_(value)
            rank_model.refresh_derived_state()

    assert min(require_same_training(config, load)) > 0
