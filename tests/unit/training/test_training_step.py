"""Edge cases of a step of a single rank: no label in the batch, a loss that is not finite, and gradient clipping."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.comm.exchange import Pending
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.labels import IGNORED_LABEL
from megatrain.optim import ShardedOptimizer
from megatrain.schedule import build_schedule
from megatrain.training.rank_model import RankModel
from megatrain.training.step import Requests, StepOutcome, train_step
from tests.helpers.single_rank import (
    SilentRecorder,
    add_to_losses,
    make_config,
    microbatches,
    random_tokens,
    single_rank_model,
)


def step(rank_model: RankModel, tokens: Tensor, *, grad_clip: float = 0.0, **options: Any) -> StepOutcome:
    """Train on [S + 1, B] token ids; negative ones are labels that do not count."""
    labels = tokens[1:].where(tokens[1:] >= 0, IGNORED_LABEL)
    inputs = [
        rank_model.pipeline_input(
            microbatch.tokens_SB, labels[:, 2 * index : 2 * index + 2], microbatch.context.sample_B, None
        )
        for index, microbatch in enumerate(microbatches(rank_model, tokens.clamp(min=0)))
    ]
    arguments: dict[str, Any] = {
        "lr": 1e-2,
        "recorder": SilentRecorder(),
    } | options
    num_labels = int((labels != IGNORED_LABEL).sum())
    schedule = arguments.pop("schedule", None) or build_schedule("1f1b", 1, 1, len(inputs))
    return train_step(rank_model, schedule, inputs, num_label_tokens=num_labels, grad_clip=grad_clip, **arguments)


def masters(rank_model: RankModel) -> list[Tensor]:
    return [shard.tensor.clone() for kind, shard, _ in rank_model.optimizer.flat_shards() if kind == "master"]


@pytest.fixture
def scales(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The factors of the gradients that the optimizer receives."""
    given: list[float] = []
    update = ShardedOptimizer.step

    def note(self: ShardedOptimizer, lr: float, gradient_scale: float) -> None:
        given.append(gradient_scale)
        update(self, lr, gradient_scale)

    monkeypatch.setattr(ShardedOptimizer, "step", note)
    return given


@pytest.mark.parametrize("grad_clip", [0.0, 0.5])
def test_a_batch_without_a_label_has_loss_0_and_is_not_skipped(grad_clip: float, scales: list[float]) -> None:
    config = make_config(optimizer={"lr": 1e-2, "weight_decay": 0.0})
    rank_model = single_rank_model(config)
    before = masters(rank_model)
    tokens = random_tokens(config, seed=1)
    tokens[1:] = -1

    assert step(rank_model, tokens, grad_clip=grad_clip) == StepOutcome(0.0, 0.0, is_skipped=False, agreed=Requests())
    assert scales == [1.0]
    assert rank_model.optimizer.num_updates == 1
    # no gradient, no decay: an update that changes nothing, and leaves no NaN for the next one
    assert all(torch.equal(one, other) for one, other in zip(before, masters(rank_model), strict=True))
    later = step(rank_model, random_tokens(config, seed=2))
    assert 3 < later.loss < 6
    assert later.grad_norm > 0


def test_loss_is_divided_by_the_number_of_counted_labels() -> None:
    config = make_config()
    tokens = random_tokens(config, seed=1)
    masked = tokens.clone()
    masked[1:6] = -1
    losses = [step(single_rank_model(config), one).loss for one in (tokens, masked)]

    assert 3 < losses[1] < 6
    assert losses[0] != losses[1]


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_loss_that_is_not_finite_skips_the_step(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    rank_model = single_rank_model(config)
    before = masters(rank_model)
    add_to_losses(rank_model, monkeypatch, lambda: loss)
    outcome = step(rank_model, random_tokens(config, seed=1))

    assert outcome.is_skipped
    assert math.isfinite(outcome.grad_norm)
    assert not math.isfinite(outcome.loss)
    assert rank_model.optimizer.num_updates == 0
    assert all(torch.equal(one, other) for one, other in zip(before, masters(rank_model), strict=True))


@pytest.mark.parametrize("grad_clip", [0.0, 1e-3, 1e9])
def test_gradients_are_scaled_to_the_norm_allowed(grad_clip: float, scales: list[float]) -> None:
    config = make_config()
    outcome = step(single_rank_model(config), random_tokens(config, seed=1), grad_clip=grad_clip)

    assert 0.1 < outcome.grad_norm < 1e9
    # the usual 1e-6, so that a norm of 0 causes no division by 0
    assert scales == [1e-3 / (outcome.grad_norm + 1e-6) if grad_clip == 1e-3 else 1.0]


def test_requests_are_agreed() -> None:
    config = make_config()
    rank_model, tokens = single_rank_model(config), random_tokens(config, seed=1)
    for flags in itertools.product([False, True], repeat=3):
        outcome = step(rank_model, tokens, requests=partial(Requests, *flags))
        assert outcome.agreed == Requests(*flags)


def test_executed_actions_are_those_of_the_schedule() -> None:
    """And the gathers at the start of a step's list start while its batch is fetched: before the step begins."""
    config = make_config(
        model={"num_layers": 4, "vocab_size": 61, "seq_len": 8, "hidden_size": 16, "num_heads": 4},
        parallel={"num_chunks": 4, "schedule": "interleaved", "bucket_size": 500},
    )
    rank_model = single_rank_model(config)
    ran: list[str] = []
    for chunk in rank_model.data_parallel:
        for bucket in chunk.buckets:
            bucket.replicas = SumNotingGroup(ran)  # type: ignore[assignment]
    for chunk, pipeline_chunk in enumerate(rank_model.pipeline.chunks):
        pipeline_chunk.module.register_forward_pre_hook(lambda *_, chunk=chunk: ran.append(f"FORWARD {chunk}"))
    schedule = config.parallel.build_schedule(2)
    listed = [f"{stage.kind.name} {stage.chunk}" for stage in schedule.stages[0] if stage.kind.name in KINDS]
    initial = [f"GATHER {gather.chunk}" for gather in schedule.initial_gathers(0)]
    for _ in range(2):
        ran.clear()
        step(rank_model, random_tokens(config, seed=1), schedule=schedule)
        begin = [] if rank_model.optimizer.num_updates == 1 else initial

        assert [*begin, *without_repeats(ran)] == [*listed, *initial]


KINDS = ("GATHER", "FORWARD", "REDUCE")


def without_repeats(notes: list[str]) -> list[str]:
    """Return the notes; of several consecutive buckets, only the first one's."""
    return [note for note, before in itertools.pairwise([*notes, ""]) if note != before]


class SumNotingGroup:
    """The group of a single rank; records of which chunk a tensor is gathered or reduced."""

    name, size, rank = "dp", 1, 0

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def all_gather(self, x: Tensor, operation: Operation, *, out: Tensor, chunk: int) -> Pending:
        self._notes.append(f"GATHER {chunk}")
        return Pending(out)

    def reduce_scatter(
        self, x: Tensor, operation: Operation, *, out: Tensor, chunk: int, sums_in_fp32: bool
    ) -> Pending:
        self._notes.append(f"REDUCE {chunk}")
        return Pending(out)
