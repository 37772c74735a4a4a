"""One optimizer step: forward and backward of all micro-batches, reduction, clipping, update.

Every rank divides the loss of a token by the number of label tokens in the GLOBAL batch before backward, so a
gradient's scale does not depend on the layout or on accumulation. A step is skipped if its loss or gradient norm is not
finite. All ranks have the same loss and norm, so they agree without another collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import numpy as np
import torch

from megatrain.comm import Mesh
from megatrain.contracts.black_box.operations import Operation, all_reduce_along
from megatrain.data.step_batch import SampleSources
from megatrain.ops.to_device import to_device
from megatrain.parallel.pipeline import PipelineInput
from megatrain.reporting import SourceReport
from megatrain.schedule import Schedule
from megatrain.telemetry.recorder import Recorder
from megatrain.training.rank_model import RankModel


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests to the step loop: those of one rank, or of all ranks together."""

    stop: bool = False
    checkpoint: bool = False
    """The executor requests a checkpoint."""
    is_interval_over: bool = False
    """The next checkpoint by time is due."""


_NUM_REQUESTS = len(fields(Requests))


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step, the same on all ranks. `loss` is in nats per label token; `agreed` has the requests of all
    ranks. `sources`: the sources with label tokens or replaced samples in this step, if `train_step` got the sources of
    the samples. `num_replaced`: the replaced samples of each source, if `train_step` got those of this rank.
    `is_disputed`: ranks of a replica have replaced different samples, so the step has updated nothing.
    """

    loss: float
    grad_norm: float
    is_skipped: bool
    agreed: Requests
    sources: tuple[SourceReport, ...] = ()
    num_label_tokens: int = 0
    num_replaced: tuple[int, ...] = ()
    is_disputed: bool = False


class ReplacedSamples(NamedTuple):
    """A rank's part of two sums over all ranks: the replaced samples of each source, and `difference`, whose sum is 0
    if the ranks of each replica have replaced the same samples."""

    difference: float
    by_source: tuple[float, ...]


def train_step(
    rank_model: RankModel,
    schedule: Schedule,
    inputs: Sequence[PipelineInput],
    *,
    num_label_tokens: int,
    lr: float,
    grad_clip: float,
    requests: Callable[[], Requests] = Requests,
    recorder: Recorder,
    sources: SampleSources | None = None,
    replaced: ReplacedSamples | None = None,
    check_replicas: Callable[[], None] | None = None,
) -> StepOutcome:
    """Train on one global batch. `inputs` are the micro-batches of this rank's pipeline.

    num_label_tokens: the count in these micro-batches. grad_clip: the largest gradient norm, 0 for no limit.
    requests: returns the requests to this rank. Called at the end of backward, before the ranks agree and update.
    sources: the source of each sample of `inputs`, given on all ranks or on none. A model that does not keep the losses
    of samples reports no source.
    replaced: the samples that were replaced, given on all ranks or on none.
    check_replicas: called when the step has used the parameters and has not changed them yet.
    Communication: all exchanges of the step. Returns when this rank's shards are updated and the gathers at the start
    of the schedule have started; they overlap with the fetching of the next batch. A skipped or disputed step does not
    update or gather.
    """
    mesh = rank_model.mesh
    # filled on the device: a copy from the host would wait until the device has finished the previous step
    token_count = torch.full((1,), float(num_label_tokens), dtype=torch.float64, device=rank_model.device)
    counted = mesh.replicas.all_reduce(token_count, all_reduce_along(mesh.replicas.name))
    for chunk in rank_model.data_parallel:
        chunk.start_step()
    # a batch without labels has no loss; a count of 1 avoids a division by zero
    losses = rank_model.pipeline.train(schedule, inputs, lambda: 1.0 / counted.wait().clamp(min=1.0)[0])
    for chunk in rank_model.data_parallel:
        chunk.finish_reduce()
    if check_replicas is not None:
        check_replicas()

    with recorder.span(Operation.CLIP):
        own_loss = losses.total if mesh.contributes_loss else torch.zeros_like(losses.total)
        parts = [counted.wait(), rank_model.optimizer.gradient_square_sum()[None], own_loss[None]]
        samples_MB = losses.samples_MB if sources is not None and mesh.contributes_loss else None
        if samples_MB is not None:
            parts.append(samples_MB.ravel())
        # the host waits for the computation of the step only here; a request that arrives before its end still counts
        total_tokens, square_sum, loss_total, *of_samples = torch.cat(parts).tolist()
        by_source = _sums_by_source(sources, of_samples if samples_MB is not None else None)
        own_requests = map(float, astuple(requests()))
        of_replaced: tuple[float, ...] = () if replaced is None else (*replaced.by_source, replaced.difference)
        square_sum, loss_total, *others = _summed(
            mesh, [square_sum, loss_total, *own_requests, *by_source, *of_replaced]
        )
    requested, others = others[:_NUM_REQUESTS], others[_NUM_REQUESTS:]
    by_source, of_replaced = others[: len(by_source)], tuple(others[len(by_source) :])
    grad_norm = math.sqrt(square_sum) if square_sum >= 0.0 else math.nan
    loss = loss_total / max(total_tokens, 1)
    agreed = Requests(*(count > 0.0 for count in requested))
    if of_replaced and of_replaced[-1] != 0.0:
        return StepOutcome(loss, grad_norm, is_skipped=True, agreed=agreed, is_disputed=True)
    is_skipped = not (math.isfinite(grad_norm) and math.isfinite(loss))
    rank_model.advance_fp8_scales()  # before the gathers of parameters, because this collective would queue behind them
    if not is_skipped:
        with recorder.span(Operation.OPTIMIZER):
            rank_model.optimizer.step(lr, _clip_scale(grad_norm, grad_clip))
        rank_model.pipeline.start_initial_gathers(schedule)
    num_replaced = tuple(map(int, of_replaced[:-1]))
    reports = _source_reports(sources, by_source, num_replaced)
    return StepOutcome(loss, grad_norm, is_skipped, agreed, reports, int(total_tokens), num_replaced)


def _summed(mesh: Mesh, own: Sequence[float]) -> list[float]:
    """Return the sum of each number over all ranks, in fp64. With one rank there is no communication."""
    if mesh.is_alone:
        return list(own)
    summed: list[float] = mesh.sum_over_all(to_device(torch.tensor(own, dtype=torch.float64), mesh.device)).tolist()
    return summed


def _sums_by_source(sources: SampleSources | None, of_samples: Sequence[float] | None) -> list[float]:
    """Return this rank's part of the sums of the sources: losses, then label tokens.

    of_samples: the losses of all samples, by micro-batch; None on ranks that contribute none.
    """
    if sources is None:
        return []
    losses_MB = None if of_samples is None else np.array(of_samples).reshape(sources.source_MB.shape)
    sums: list[float] = sources.sums(losses_MB).ravel().tolist()
    return sums


def _source_reports(
    sources: SampleSources | None, sums: Sequence[float], num_replaced: Sequence[int]
) -> tuple[SourceReport, ...]:
    if sources is None:
        return ()
    names = sources.names
    counts_of = zip(names, sums[: len(names)], sums[len(names) :], num_replaced or (0,) * len(names), strict=True)
    return tuple(
        SourceReport(name=name, loss=loss / count if count else math.nan, num_tokens=int(count), num_replaced=replaced)
        for name, loss, count, replaced in counts_of
        if count > 0.0 or replaced
    )


def _clip_scale(grad_norm: float, grad_clip: float) -> float:
    return min(1.0, grad_clip / (grad_norm + 1e-6)) if grad_clip > 0.0 else 1.0
