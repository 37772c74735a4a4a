"""A mixture of two sources, and the loss of each by torch's own cross entropy, on the logits of one process.

A token shows its source: those of `code` are the upper half of the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.config.config import Config
from megatrain.data.indexed import token_dtype
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.step_batch import StepBatch
from megatrain.training.rank_model import RankModel

FIRST_TOKEN = {"web": 0, "code": 45}
VOCAB_SIZE = 90


def write_mixture(root: Path) -> dict[str, dict[str, Any]]:
    """Write the files of both sources; return the tables that name them. The ends of documents have no loss."""
    for name, first in FIRST_TOKEN.items():
        generator = np.random.default_rng(first)
        with IndexedWriter(root / name, token_dtype(VOCAB_SIZE)) as writer:
            for length in generator.integers(1, 30, 100):
                writer.add_document(generator.integers(first, first + 45, length))
    return {
        "data": {"train": "", "has_document_mask": True},
        "data_source": {"path": str(root / "web"), "name": "web", "weight": 3.0},
        "data_source-2": {"path": str(root / "code"), "name": "code", "weight": 2.0},
    }


def losses_by_source(rank_model: RankModel, batch: StepBatch) -> dict[str, tuple[float, int]]:
    """Return the mean loss of each source that has labels in the batch, and how many. The model must be whole."""
    found: dict[str, list[Tensor]] = {}
    model, config = rank_model.pipeline.chunks[0].module, rank_model.config
    for micro in batch.microbatches:
        given = rank_model.input_of(micro)
        with torch.no_grad():
            logits_SBV = model.loss_head.logits(model(given.tokens_SB, given.context))[..., : config.model.vocab_size]
        for sample in range(micro.tokens_SB.shape[1]):
            name = "code" if micro.tokens_SB[0, sample] >= FIRST_TOKEN["code"] else "web"
            found.setdefault(name, []).append(_token_losses(config, logits_SBV[:, sample], given.labels_SB[:, sample]))
    joined = {name: torch.cat(parts) for name, parts in found.items()}
    return {name: (loss_T.mean().item(), loss_T.numel()) for name, loss_T in joined.items() if loss_T.numel()}


def _token_losses(config: Config, logits_SV: Tensor, labels_S: Tensor) -> Tensor:
    """Return the losses of the positions that have a label."""
    logits_SV, labels_S = logits_SV[labels_S >= 0], labels_S[labels_S >= 0]
    smoothing = config.train.label_smoothing
    loss_S = functional.cross_entropy(logits_SV, labels_S, reduction="none", label_smoothing=smoothing)
    return loss_S + config.train.z_loss * logits_SV.logsumexp(-1).square()
