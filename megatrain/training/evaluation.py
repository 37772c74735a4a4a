"""Loss on held-out data, computed by the same pipeline with forwards only.

Every dp rank reads its part of the windows, and all ranks add their sums at the end. The results of different layouts
differ only by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch

from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Phase
from megatrain.data.dataset import open_dataset
from megatrain.data.held_out import evaluation_batches
from megatrain.data.indexed import IndexedDataset
from megatrain.data.meta import META_NAME, read_meta
from megatrain.data.reader import MicroBatch, num_label_tokens
from megatrain.reporting import EvaluationReport, Reporter
from megatrain.training.extensions import Callback
from megatrain.training.phases import Phases
from megatrain.training.rank_model import RankModel

_MICROBATCHES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss over `num_tokens` held-out tokens, in nats. `bits_per_byte` needs the text's size in bytes."""

    loss: float
    num_tokens: int
    bits_per_byte: float | None


def evaluate(rank_model: RankModel, dataset: IndexedDataset, text_bytes: int | None) -> Evaluation:
    """Return the loss on the configured number of windows of `dataset`, in file order.

    text_bytes: size of the whole split's text, None where unknown.
    Communication: forward passes of all ranks, then one small all-reduce per axis.
    """
    config, mesh = rank_model.config, rank_model.mesh
    rank_model.set_training(False)
    loss_sum = torch.zeros((), dtype=torch.float64, device=rank_model.device)
    count = 0
    batches = iter(
        evaluation_batches(
            dataset,
            config.model.seq_len,
            config.batch.micro_batch_size,
            *mesh.layout.sample_share(mesh.rank),
            config.evaluation.num_samples,
            has_document_mask=config.data.has_document_mask,
        )
    )
    while group := list(islice(batches, max(_MICROBATCHES_AT_ONCE, mesh.layout.pp_size))):
        loss_sum += _loss_sum(rank_model, config, group)
        count += sum(map(num_label_tokens, group))
    rank_model.set_training(True)
    # every rank of a pipeline has the same count
    sums = torch.stack([loss_sum, torch.full_like(loss_sum, float(count))]) * float(mesh.contributes_loss)
    total_loss, total_count = mesh.sum_over_all(sums).tolist()
    covers_all = config.evaluation.num_samples == 0
    bits = total_loss / math.log(2.0) / text_bytes if text_bytes and covers_all else None
    return Evaluation(total_loss / max(total_count, 1.0), int(total_count), bits)


def _loss_sum(rank_model: RankModel, config: Config, group: Iterable[MicroBatch]) -> torch.Tensor:
    inputs = [rank_model.pipeline_input(m.tokens_SB, m.labels_SB, m.sample_B, m.document_SB) for m in group]
    return rank_model.pipeline.evaluate(config.parallel.forward_only(len(inputs)), inputs)


Validation = tuple[IndexedDataset, int | None]
"""The held-out tokens, and the size of their text in bytes where it is known."""


def open_validation(config: Config) -> Validation | None:
    """Open the held-out tokens; return None if the configuration names none.

    Raises: DataError when the files cannot be used.
    """
    if not config.data.validation:
        return None
    prefix = Path(config.data.validation)
    dataset = open_dataset(prefix, config.model.vocab_size)
    meta = read_meta(prefix.parent / META_NAME)
    return dataset, meta.validation.text_bytes if meta is not None and prefix.name == "validation" else None


class Evaluations:
    """Evaluates every evaluation.interval steps and after the last step. Does nothing without held-out tokens.

    reporter: None on all ranks except the reporting rank. callbacks: get each result after the reporter.
    """

    def __init__(
        self,
        rank_model: RankModel,
        validation: Validation | None,
        phases: Phases,
        reporter: Reporter | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._rank_model = rank_model
        self._validation = validation
        self._phases = phases
        self._reporter = reporter
        self._callbacks = callbacks

    def after_step(self, step: int) -> None:
        """Evaluate if it is due after `step` steps.

        Communication: that of `evaluate`.
        """
        config = self._rank_model.config
        interval, is_last = config.evaluation.interval, step == config.train.steps
        if self._validation is None or not (is_last or (interval and step % interval == 0)):
            return
        started = perf_counter()
        with self._phases.enter(Phase.EVALUATION, config.runtime.evaluation_timeout_s, Operation.EVALUATION):
            result = evaluate(self._rank_model, *self._validation)
        report = EvaluationReport(
            step=step,
            loss=result.loss,
            num_tokens=result.num_tokens,
            bits_per_byte=result.bits_per_byte,
            duration_s=perf_counter() - started,
        )
        if self._reporter is not None:
            self._reporter.evaluation(report)
        for callback in self._callbacks:
            callback.on_evaluation(report)
