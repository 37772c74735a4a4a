"""Loss on held-out data, computed by the same pipeline with forwards only.

Every dp rank reads its part of the samples of each validation set, and all ranks add their sums at the end. The results
of different layouts differ only by rounding. A picture has no loss; only its caption has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Phase
from megatrain.contracts.errors import DataError
from megatrain.data.bad_tokens import BadSample
from megatrain.data.held_out import evaluation_batches
from megatrain.data.microbatch import MicroBatch
from megatrain.reporting import EvaluationReport, Reporter, ValidationSetReport
from megatrain.telemetry.recorder import Recorder
from megatrain.training.bad_samples import disagreement, first_peer, log_replaced
from megatrain.training.extensions import Callback
from megatrain.training.phases import Phases
from megatrain.training.picture_data import shards_of
from megatrain.training.rank_model import RankModel
from megatrain.training.read_records import recorded_reads
from megatrain.training.training_data import ValidationSet

_MICROBATCHES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The summed loss of `num_tokens` held-out tokens, in nats.

    `text_bytes`: the size of their text, None if it is unknown or only a part of the text was evaluated. `bad_samples`:
    of this rank's part, which were left out because they cannot be used.
    """

    loss_sum: float
    num_tokens: int
    text_bytes: int | None
    bad_samples: tuple[BadSample, ...] = ()

    @property
    def loss(self) -> float:
        """The mean over the tokens, in nats."""
        return self.loss_sum / max(self.num_tokens, 1)

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss_sum / math.log(2.0) / self.text_bytes if self.text_bytes else None


def combined(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation of all tokens of several sets: each token counts the same."""
    sizes = [evaluation.text_bytes for evaluation in evaluations if evaluation.text_bytes]
    return Evaluation(
        sum(evaluation.loss_sum for evaluation in evaluations),
        sum(evaluation.num_tokens for evaluation in evaluations),
        sum(sizes) if len(sizes) == len(evaluations) else None,
    )


def evaluate(rank_model: RankModel, sets: Sequence[ValidationSet], recorder: Recorder) -> list[Evaluation]:
    """Return the loss on the first `num_samples` samples of each of `sets`, in file order. Records the reads.

    Communication: forward passes of all ranks, then one small all-reduce per axis.
    Raises: BadSampleError when a sample cannot be used, unless it is a picture and data.bad_samples is "replace";
    DataError, on all ranks, when the ranks of a replica have found different pictures unusable, or no sample of a set
    can be used; UnreachableError when no producer of pictures answers.
    """
    mesh = rank_model.mesh
    rank_model.set_training(False)
    # every rank of a pipeline has the same count
    parts = [_part(rank_model, validation_set, recorder) for validation_set in sets]
    sums = mesh.sum_over_all(torch.stack([sums for sums, _ in parts])).tolist()
    rank_model.set_training(True)
    covers_all = rank_model.config.evaluation.num_samples == 0
    evaluations = []
    for validation_set, (_, bad_samples), (loss_sum, count, difference) in zip(sets, parts, sums, strict=True):
        name = f"validation set {validation_set.name}"
        if difference or not count:
            log_replaced(bad_samples, [validation_set.name], set())
        if difference:
            raise DataError(
                f"{name}: the hosts of a replica found different samples unusable, so their copies of the files or the "
                f"decoders differ; the logs of the ranks name the samples: repair the files ({_verify(validation_set)})"
            )
        if not count:
            raise DataError(
                f'{name}: none of its {validation_set.num_samples} samples can be used, and data.bad_samples="replace" '
                "leaves them out; the log names the reason of each: repair the files, or remove the set"
            )
        text_bytes = validation_set.text_bytes if covers_all else None
        evaluations.append(Evaluation(loss_sum, int(count), text_bytes, bad_samples))
    return evaluations


def _verify(validation_set: ValidationSet) -> str:
    """Return the command that names what is wrong with the files of a set."""
    shards = shards_of(validation_set.reader)
    return "megatrain data verify" if shards is None else f"megatrain data pictures verify {shards.index.directory}"


def _part(
    rank_model: RankModel, validation_set: ValidationSet, recorder: Recorder
) -> tuple[torch.Tensor, tuple[BadSample, ...]]:
    """Return this rank's part of the sums over all ranks for a set, and its bad samples.

    Shape of the sums: [3], the loss, the number of tokens, and the disagreement about bad samples.
    """
    config, mesh = rank_model.config, rank_model.mesh
    loss_sum = torch.zeros((), dtype=torch.float64, device=rank_model.device)
    count = 0
    bad_samples: list[BadSample] = []
    reads = evaluation_batches(
        validation_set.reader,
        validation_set.num_samples,
        config.batch.micro_batch_size,
        *mesh.layout.sample_share(mesh.rank),
        at_once=max(_MICROBATCHES_AT_ONCE, mesh.layout.pp_size),
        has_patches=mesh.stage == 0,
    )
    for read in recorded_reads(recorder, reads):
        loss_sum += _loss_sum(rank_model, config, read.microbatches)
        count += sum(one.num_label_tokens for one in read.microbatches)
        bad_samples += read.bad_samples
    first, num_peers = first_peer(mesh.layout, mesh.rank)
    part = float(mesh.contributes_loss)
    difference = disagreement(bad_samples, is_first=first == mesh.rank, num_peers=num_peers)
    sums = [loss_sum * part, *(torch.full_like(loss_sum, value) for value in (count * part, difference))]
    return torch.stack(sums), tuple(bad_samples)


def _loss_sum(rank_model: RankModel, config: Config, group: Iterable[MicroBatch]) -> torch.Tensor:
    inputs = [rank_model.input_of(micro) for micro in group]
    return rank_model.pipeline.evaluate(config.parallel.forward_only(len(inputs)), inputs)


class Evaluations:
    """Evaluates every evaluation.interval steps and after the last step. Does nothing without held-out data.

    recorder: records the reads. reporter: None on all ranks except the reporting rank. callbacks: receive each result
    after the reporter.
    """

    def __init__(
        self,
        rank_model: RankModel,
        sets: Sequence[ValidationSet],
        phases: Phases,
        recorder: Recorder,
        reporter: Reporter | None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._rank_model = rank_model
        self._sets = sets
        self._phases = phases
        self._recorder = recorder
        self._reporter = reporter
        self._callbacks = callbacks
        self._logged: set[str] = set()

    def after_step(self, step: int) -> None:
        """Evaluate if an evaluation is due after `step` steps.

        Communication: the same as for `evaluate`.
        """
        config = self._rank_model.config
        if not self._is_due(step):
            return
        started = perf_counter()
        with self._phases.enter(Phase.EVALUATION, config.runtime.evaluation_timeout_s, Operation.EVALUATION):
            found = evaluate(self._rank_model, self._sets, self._recorder)
        if self._rank_model.mesh.contributes_loss:
            for validation_set, part in zip(self._sets, found, strict=True):
                log_replaced(part.bad_samples, [validation_set.name], self._logged)
        total = combined(found)
        report = EvaluationReport(
            step=step,
            loss=total.loss,
            num_tokens=total.num_tokens,
            bits_per_byte=total.bits_per_byte,
            duration_s=perf_counter() - started,
            sets=tuple(
                ValidationSetReport(
                    name=validation_set.name,
                    loss=part.loss,
                    num_tokens=part.num_tokens,
                    bits_per_byte=part.bits_per_byte,
                )
                for validation_set, part in zip(self._sets, found, strict=True)
            ),
        )
        if self._reporter is not None:
            self._reporter.evaluation(report)
        for callback in self._callbacks:
            callback.on_evaluation(report)

    def left_out(self, step: int) -> str:
        """Return a message for the log about the evaluation that a stop after `step` steps leaves out; "" for none."""
        return (
            f"the evaluation after step {step} is left out, because the run stops there" if self._is_due(step) else ""
        )

    def _is_due(self, step: int) -> bool:
        config = self._rank_model.config
        is_last, interval = step == config.train.steps, config.evaluation.interval
        return bool(self._sets) and (is_last or (interval > 0 and step % interval == 0))
