"""The training loss of each source in every layout: that of the model alone on the samples of that source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from megatrain.config.config import Config
from megatrain.model import TokenContext, Transformer
from megatrain.ops.documents import pack_documents
from megatrain.reporting import SourceReport
from megatrain.training.training_data import open_reader
from tests.dist.conftest import SEQ_LEN, VOCAB_SIZE
from tests.dist.training_jobs import Run, Tables, TrainingJobs, assert_close
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config, on_layout

BATCH = 8
NAMES = ("web", "code", "books")


@pytest.fixture(scope="session")
def three_sources(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Return the tables of a mixture: web and code in the first step, web and books from then on."""
    root = tmp_path_factory.mktemp("sources")
    prefixes = {name: write_corpus(root / name, 2000, VOCAB_SIZE, seed) for seed, name in enumerate(NAMES)}
    keys = ("data_source", "data_source-2", "data_source-3")
    return {
        **{key: {"name": name, "path": str(prefixes[name])} for key, name in zip(keys, NAMES, strict=True)},
        "data_source-3": {"name": "books", "path": str(prefixes["books"]), "weight": 0.0},
        "data_stage": {"after_tokens": BATCH * SEQ_LEN, "weights": "web=3, books=1"},
        # samples have unequal numbers of labels
        "data": {"train": "", "has_document_mask": True},
    }


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "tp2-pp2": [on_layout(2, 2, 1), {"parallel": {"recompute": "selective"}}],
    "dp8": [on_layout(1, 1, 8)],
    "pp4-zero-bubble": [on_layout(1, 4, 1, schedule="zero_bubble")],
    "tp2-pp2-dp2-interleaved": [on_layout(2, 2, 2, num_chunks=2), {"parallel": {"recompute": "full"}}],
    "tp2-dp2-chunked-sequence": [on_layout(2, 1, 2), {"parallel": {"num_sequence_chunks": 2}}],
}


@pytest.mark.slow(kept=["tp2-pp2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_source_has_its_loss_in_every_layout(layout: str, jobs: TrainingJobs, three_sources: Tables) -> None:
    reference_config = make_config(three_sources)
    reference = jobs.remembered(reference_config)
    assert [[one.name for one in report.sources] for report in reference.steps] == [
        ["web", "code"], ["web", "books"], ["web", "books"],
    ]  # fmt: skip
    means = means_by_torch(reference_config, reference.initial)
    assert_close([one.loss for one in reference.steps[0].sources], list(means.values()), 1e-12, "source")

    run = jobs.run(make_config(three_sources, *LAYOUTS[layout]))
    assert counts(run) == counts(reference)
    assert_close(losses(run), losses(reference), 1e-10, "source")
    for report in run.steps:
        total = sum(one.loss * one.num_tokens for one in report.sources)
        assert_close([report.loss], [total / sum(one.num_tokens for one in report.sources)], 1e-12, "sum of sources")


def reports(run: Run) -> list[SourceReport]:
    return [one for report in run.steps for one in report.sources]


def counts(run: Run) -> list[tuple[str, int]]:
    return [(one.name, one.num_tokens) for one in reports(run)]


def losses(run: Run) -> list[float]:
    return [one.loss for one in reports(run)]


def means_by_torch(config: Config, weights: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Return the mean loss of each source in the first step, by the single-device model and torch's cross entropy."""
    model = Transformer(config.model).double()
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()}, strict=False)
    assert model.loss_head is not None
    reader = open_reader(config)
    found: dict[str, list[float]] = {"web": [], "code": []}
    for micro in reader.read_step(0, BATCH, 0, 1, 1).microbatches:
        assert micro.document_SB is not None
        context = TokenContext(micro.sample_B, SEQ_LEN, pack_documents(micro.document_SB))
        with torch.no_grad():
            logits_SBV = model.loss_head.logits(model.hidden(micro.tokens_SB, context))
        logits_SV, labels_S = logits_SBV[:, 0, :VOCAB_SIZE], micro.labels_SB[:, 0]
        (source,), _ = reader.mixture.places(micro.sample_B.numpy())
        losses_S = functional.cross_entropy(logits_SV, labels_S, reduction="none")
        found[NAMES[source]].extend(losses_S[labels_S >= 0].tolist())
    return {name: float(np.mean(values)) for name, values in found.items()}
