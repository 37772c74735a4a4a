"""The training loss of each source on a lone rank, against the model alone and torch's cross entropy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.config.config import Config
from megatrain.data.sample_sources import SampleSources
from megatrain.model import Transformer
from megatrain.ops.cross_entropy import IGNORED_LABEL
from megatrain.parallel.pipeline import PipelineInput
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step import StepOutcome, train_step
from tests.helpers.lone_rank import (
    SilentRecorder,
    lone_mesh,
    lone_rank_model,
    make_config,
    microbatches,
    parameters_by_name,
    random_tokens,
)
from tests.helpers.own_loss_program import summed_loss
from tests.helpers.replayed_operations import ReplayedOperations

NAMES = ("web", "code", "empty", "books")
SOURCE_MB = np.array([[0, 1], [1, 2], [0, 0]])
"""Books have no sample, and the sample of the source empty has no label."""
TWO_SOURCES: dict[str, Any] = {"data_source": {"path": "web"}, "data_source-2": {"path": "code"}}
BATCH: dict[str, Any] = {"batch": {"micro_batch_size": 2, "global_batch_size": 6}}
STEPS = 4


def batch_of(rank_model: RankModel, seed: int) -> tuple[list[PipelineInput], SampleSources]:
    inputs = microbatches(rank_model, random_tokens(rank_model.config, seed))
    inputs = [replace(one, labels_SB=one.labels_SB.clone()) for one in inputs]  # they share memory with tokens
    inputs[0].labels_SB[seed:4, 1] = IGNORED_LABEL
    inputs[1].labels_SB[:, 1] = IGNORED_LABEL
    counts_MB = torch.stack([(one.labels_SB >= 0).sum(0) for one in inputs]).numpy()
    return inputs, SampleSources(NAMES, SOURCE_MB, counts_MB)


def take_step(rank_model: RankModel, inputs: list[PipelineInput], sources: SampleSources | None) -> StepOutcome:
    return train_step(
        rank_model,
        rank_model.config.parallel.build_schedule(len(inputs)),
        inputs,
        num_label_tokens=sum(int((one.labels_SB >= 0).sum()) for one in inputs),
        lr=1e-2,
        grad_clip=1.0,
        recorder=SilentRecorder(),
        sources=sources,
    )


def losses_by_torch(config: Config, weights: dict[str, Tensor], inputs: list[PipelineInput]) -> dict[str, list[float]]:
    """Return the losses of the tokens of each source that have a label."""
    model = Transformer(config.model).double()
    model.load_state_dict(weights, strict=False)
    assert model.loss_head is not None
    found: dict[str, list[float]] = {}
    for one, source_B in zip(inputs, SOURCE_MB, strict=True):
        with torch.no_grad():
            logits_SBV = model.loss_head.logits(model.hidden(one.tokens_SB, one.context))
        for column, source in enumerate(source_B):
            labels_S = one.labels_SB[:, column]
            logits_SV = logits_SBV[:, column, : config.model.vocab_size]
            losses_S = functional.cross_entropy(logits_SV, labels_S, reduction="none")
            found.setdefault(NAMES[source], []).extend(losses_S[labels_S >= 0].tolist())
    return found


@pytest.mark.parametrize("is_recorded", [False, True], ids=["eager", "recorded"])
def test_each_source_has_the_mean_of_its_own_tokens(is_recorded: bool) -> None:
    config = make_config(**TWO_SOURCES, **BATCH)
    capture = ReplayedOperations() if is_recorded else None
    rank_model, plain = lone_rank_model(config, capture=capture), lone_rank_model(make_config(**BATCH))
    for seed in range(STEPS):
        inputs, sources = batch_of(rank_model, seed)
        expected = losses_by_torch(config, parameters_by_name(rank_model), inputs)
        outcome = take_step(rank_model, inputs, sources)

        assert [(one.name, one.num_tokens) for one in outcome.sources] == [
            (name, len(expected[name])) for name in ("web", "code")
        ]
        for one in outcome.sources:
            assert one.loss == pytest.approx(float(np.mean(expected[one.name])), rel=1e-12)
        # to the bit the step of a run that has no sources
        assert replace(outcome, sources=()) == take_step(plain, inputs, None)
    assert capture is None or min(capture.num_replays) > 0
    for name, weight in parameters_by_name(rank_model).items():
        assert torch.equal(weight, parameters_by_name(plain)[name]), name


def test_losses_of_sources_have_the_terms_of_training() -> None:
    config = make_config(
        **TWO_SOURCES,
        **BATCH,
        train={"steps": 5, "precision": "bf16", "seed": 7, "z_loss": 0.1, "label_smoothing": 0.2},
    )
    rank_model = lone_rank_model(config)
    outcome = take_step(rank_model, *batch_of(rank_model, seed=1))

    sums = [one.loss * one.num_tokens for one in outcome.sources]
    assert sum(sums) / sum(one.num_tokens for one in outcome.sources) == pytest.approx(outcome.loss, rel=1e-6)


@pytest.mark.parametrize("tables", [{}, {"data_source": {"path": "web"}}], ids=["no source", "a single source"])
def test_runs_of_a_single_source_keep_no_sample_losses(tables: dict[str, Any]) -> None:
    rank_model = lone_rank_model(make_config(**tables, **BATCH))
    inputs, _ = batch_of(rank_model, seed=1)

    assert not rank_model.keeps_sample_losses
    assert rank_model.pipeline.train(
        rank_model.config.parallel.build_schedule(3), inputs, lambda: torch.ones((), dtype=torch.float64)
    ).samples_MB is None  # fmt: skip


def test_a_custom_loss_leaves_sources_out() -> None:
    """It returns a sum; every rank must know that, so that all sum vectors of one length."""
    rank_model = build_rank_model(
        make_config(**TWO_SOURCES, **BATCH), lone_mesh(), SilentRecorder(), torch.device("cpu"), loss=summed_loss
    )
    assert not rank_model.keeps_sample_losses
