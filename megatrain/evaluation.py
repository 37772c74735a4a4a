"""Loss on held-out data, by the same pipeline, forward only.

Every dp rank reads its share of the windows; the sums meet at the end, so the result does not depend on the layout
beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from megatrain.assembly import Replica
from megatrain.config.config import Config
from megatrain.data.dataset import open_dataset
from megatrain.data.held_out import evaluation_batches
from megatrain.data.indexed import IndexedDataset
from megatrain.data.meta import META_NAME, read_meta
from megatrain.data.reader import MicroBatch, num_label_tokens

_MICROBATCHES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss over `num_tokens` held-out tokens, in nats. `bits_per_byte` needs the text's size in bytes."""

    loss: float
    num_tokens: int
    bits_per_byte: float | None


def evaluate(replica: Replica, dataset: IndexedDataset, text_bytes: int | None) -> Evaluation:
    """Return the loss on the configured number of windows of `dataset`, in file order.

    text_bytes: size of the whole split's text, None where unknown.
    Communication: forward passes of all ranks, then one small all-reduce an axis.
    """
    config, mesh = replica.config, replica.mesh
    replica.set_training(False)
    loss_sum = torch.zeros((), dtype=torch.float64, device=replica.device)
    count = 0
    batches = iter(
        evaluation_batches(
            dataset,
            config.model.seq_len,
            config.batch.micro_batch_size,
            mesh.coordinate["dp"],
            mesh.layout.dp_size,
            config.evaluation.num_samples,
            has_document_mask=config.data.has_document_mask,
        )
    )
    while group := list(islice(batches, max(_MICROBATCHES_AT_ONCE, mesh.layout.pp_size))):
        loss_sum += _loss_sum(replica, config, group)
        count += sum(map(num_label_tokens, group))
    replica.set_training(True)
    # one pipeline's count stands on each of its tp and pp ranks: one rank of each pipeline speaks
    speaks = mesh.is_last_stage and mesh.tp.rank == 0
    sums = torch.stack([loss_sum, torch.full_like(loss_sum, float(count))]) * float(speaks)
    total_loss, total_count = mesh.sum_over_all(sums).tolist()
    covers_all = config.evaluation.num_samples == 0
    bits = total_loss / math.log(2.0) / text_bytes if text_bytes and covers_all else None
    return Evaluation(total_loss / max(total_count, 1.0), int(total_count), bits)


def _loss_sum(replica: Replica, config: Config, group: Iterable[MicroBatch]) -> torch.Tensor:
    inputs = [replica.pipeline_input(m.tokens_SB, m.labels_SB, m.sample_B, m.document_SB) for m in group]
    return replica.pipeline.evaluate(config.parallel.forward_only(len(inputs)), inputs)


def open_validation(config: Config) -> tuple[IndexedDataset, int | None] | None:
    """Open the held-out tokens, with the bytes of their text where known; None where the configuration names none.

    Raises: DataError.
    """
    if not config.data.validation:
        return None
    prefix = Path(config.data.validation)
    dataset = open_dataset(prefix, config.model.vocab_size)
    meta = read_meta(prefix.parent / META_NAME)
    return dataset, meta.validation.text_bytes if meta is not None and prefix.name == "validation" else None
