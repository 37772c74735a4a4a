"""The training loss of each source of a mixture: equal to torch's own cross entropy, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.comm.mesh import Mesh
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.data.reader import BatchReader
from megatrain.data.step_batch import StepBatch
from megatrain.schedule import build_schedule
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step import ReplacedSamples, StepOutcome, train_step
from megatrain.training.training_data import open_reader
from tests.helpers.mixed_data import losses_by_source, write_mixture
from tests.helpers.replayed_operations import ReplayedOperations
from tests.helpers.single_rank import SilentRecorder, single_rank_mesh, single_rank_model
from tests.helpers.training_case import make_config

Tables = dict[str, dict[str, Any]]

TERMS = {"z_loss": 0.01, "label_smoothing": 0.2}
CASES: dict[str, Tables] = {
    "cross entropy alone": {},
    "terms and recompute": {"train": TERMS, "parallel": {"recompute": "full"}},
    "recorded": {"train": TERMS, "data": {"train": "", "has_document_mask": False}},
}
BATCH: Tables = {
    "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
    "batch": {"micro_batch_size": 3, "global_batch_size": 9},
}


@dataclass(frozen=True)
class MixedLosses:
    """A configuration of two sources, and the batches of its steps."""

    config: Config
    reader: BatchReader

    def batch(self, step: int) -> StepBatch:
        (plan,) = self.config.steps(Layout(), step * self.config.batch.global_batch_size, 1).plans()
        return self.reader.read_step(plan, 0)


def mixture(root: Path, *changes: Tables) -> MixedLosses:
    config = make_config(BATCH, write_mixture(root), *changes)
    return MixedLosses(config, open_reader(config))


@pytest.fixture
def mixed(tmp_path: Path) -> MixedLosses:
    return mixture(tmp_path)


def step(rank_model: RankModel, batch: StepBatch, replaced: ReplacedSamples | None = None) -> StepOutcome:
    micros = batch.microbatches
    inputs = [rank_model.input_of(micro) for micro in micros]
    schedule = build_schedule("1f1b", 1, 1, len(inputs))
    return train_step(
        rank_model, schedule, inputs, num_label_tokens=batch.num_label_tokens, lr=1e-2, grad_clip=1.0,
        recorder=SilentRecorder(), sources=batch.sources, replaced=replaced,
    )  # fmt: skip


def reported(outcome: StepOutcome) -> dict[str, tuple[float, int]]:
    return {source.name: (pytest.approx(source.loss, rel=1e-12), source.num_tokens) for source in outcome.sources}


def parameters(rank_model: RankModel) -> list[Tensor]:
    return [shard.tensor.clone() for _, shard, _ in rank_model.optimizer.flat_shards()]


@pytest.mark.slow(kept=["cross entropy alone", "recorded"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_by_source_are_those_of_torch(case: Tables, tmp_path: Path) -> None:
    mixed = mixture(tmp_path, case)
    # A captured graph has no place for documents.
    capture = None if mixed.config.data.has_document_mask else ReplayedOperations()
    rank_model = single_rank_model(mixed.config, capture=capture)
    for number in range(4):
        batch = mixed.batch(number)
        expected = losses_by_source(rank_model, batch)
        outcome = step(rank_model, batch)
        assert set(expected) == {"web", "code"}
        assert reported(outcome) == expected
        assert sum(source.num_tokens for source in outcome.sources) == batch.num_label_tokens
        weighted = sum(source.loss * source.num_tokens for source in outcome.sources) / batch.num_label_tokens
        assert weighted == pytest.approx(outcome.loss, rel=1e-12)


def test_a_source_without_labels_in_a_step_is_absent(mixed: MixedLosses) -> None:
    batch = mixed.batch(0)
    assert batch.sources is not None
    is_web_MB = batch.sources.source_MB == batch.sources.names.index("web")
    microbatches = [
        replace(
            micro,
            labels_SB=np.where(is_web_B, micro.labels_SB, -100),
            num_labels_B=np.where(is_web_B, micro.num_labels_B, 0),
        )
        for micro, is_web_B in zip(batch.microbatches, is_web_MB, strict=True)
    ]
    counts_MB = np.where(is_web_MB, batch.sources.num_labels_MB, 0)
    num_labels, sources = int(counts_MB.sum()), replace(batch.sources, num_labels_MB=counts_MB)
    outcome = step(single_rank_model(mixed.config), replace(batch, microbatches=microbatches, sources=sources))

    (web,) = outcome.sources
    assert (web.name, web.num_tokens) == ("web", num_labels)
    assert web.loss == pytest.approx(outcome.loss, rel=1e-12)


def test_losses_by_source_change_nothing_else(mixed: MixedLosses, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    sum_over_all = Mesh.sum_over_all

    def note(mesh: Mesh, x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return sum_over_all(mesh, x)

    monkeypatch.setattr(Mesh, "sum_over_all", note)
    monkeypatch.setattr(Mesh, "is_alone", False)
    of_one = make_config(BATCH, {"data": {"train": "anything", "has_document_mask": True}})
    found, expected = single_rank_model(mixed.config), single_rank_model(of_one)
    kept = [one.pipeline.chunks[-1].sample_losses_B is not None for one in (found, expected)]
    assert kept == [True, False]
    for number in range(3):
        batch = mixed.batch(number)
        with_sources, without = step(found, batch), step(expected, replace(batch, sources=None))
        assert without.sources == ()
        assert replace(with_sources, sources=()) == without
        assert all(map(torch.equal, parameters(found), parameters(expected)))
    # gradient norm, loss and three requests; a loss and a count of each source
    assert sizes == [9, 5] * 3


def is_last(x: Tensor) -> Tensor:
    """Return 1 for the last number of a list, 0 for the others."""
    return (torch.arange(len(x)) == len(x) - 1).to(x.dtype)


def test_a_disputed_step_changes_nothing_until_it_is_agreed(
    mixed: MixedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    disputed, expected = single_rank_model(mixed.config), single_rank_model(mixed.config)
    sum_over_all = Mesh.sum_over_all
    for number in range(2):
        before, batch = parameters(disputed), mixed.batch(number)
        own = ReplacedSamples(0.0, (0.0, 2.0))
        with monkeypatch.context() as patch:
            patch.setattr(Mesh, "is_alone", False)
            # Another rank of the replica has replaced other samples.
            patch.setattr(Mesh, "sum_over_all", lambda mesh, x: sum_over_all(mesh, x) + is_last(x))
            outcome = step(disputed, batch, own)
        assert (outcome.is_disputed, outcome.is_skipped) == (True, True)
        assert all(map(torch.equal, parameters(disputed), before))

        outcome = step(disputed, batch, own)
        assert (outcome.is_disputed, outcome.num_replaced) == (False, (0, 2))
        assert [source.num_replaced for source in outcome.sources] == [0, 2]
        assert outcome.loss == step(expected, replace(batch, sources=None), ReplacedSamples(0.0, (1.0,))).loss
        assert all(map(torch.equal, parameters(disputed), parameters(expected)))


def test_a_loss_of_your_own_has_no_losses_by_source(mixed: MixedLosses) -> None:
    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.sum()

    device = torch.device("cpu")
    rank_model = build_rank_model(mixed.config, single_rank_mesh(), SilentRecorder(), device, loss=summed)
    assert all(chunk.sample_losses_B is None for chunk in rank_model.pipeline.chunks)
    assert step(rank_model, mixed.batch(0)).sources == ()
