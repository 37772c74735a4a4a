"""One optimizer step: forward and backward of all micro-batches, reduction, clipping, update.

The loss of a token is divided by the number of label tokens in the GLOBAL batch before backward, everywhere, so neither
the layout nor accumulation changes a gradient's scale. A step whose loss or gradient norm is not finite is skipped: all
ranks learn the same norm, so they agree without a further word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from megatrain.assembly import Replica
from megatrain.contracts.operations import Operation
from megatrain.parallel.pipeline import PipelineInput
from megatrain.schedule import Schedule
from megatrain.telemetry.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Requests:
    """What is asked of the step loop, of one rank or of any."""

    stop: bool = False
    checkpoint: bool = False
    """By the executor."""
    is_interval_over: bool = False
    """So much time has passed since the last checkpoint that the next is due."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What all ranks know after a step: `loss` in nats a label token, and what some rank was asked for by its end."""

    loss: float
    grad_norm: float
    is_skipped: bool
    agreed: Requests


def train_step(
    replica: Replica,
    schedule: Schedule,
    inputs: Sequence[PipelineInput],
    *,
    num_label_tokens: int,
    lr: float,
    grad_clip: float,
    requests: Callable[[], Requests] = Requests,
    recorder: Recorder,
    check_replicas: Callable[[], None] | None = None,
) -> StepOutcome:
    """Train on one global batch, of which `inputs` are this pipeline's micro-batches.

    num_label_tokens: of this pipeline's micro-batches. grad_clip: the largest gradient norm, 0 for any.
    requests: what this rank is asked for; called when nothing of the step is left but to agree on it and to update.
    check_replicas: called when the parameters have been used and not been changed yet.
    Communication: everything that the step needs; returns when this rank's shares are updated and the gathers that lead
    the schedule have started, beneath what the caller does next: it fetches a batch.
    """
    mesh = replica.mesh
    token_count = torch.tensor([float(num_label_tokens)], dtype=torch.float64, device=replica.device)
    counted = mesh.dp.all_reduce(token_count, Operation.DP_ALL_REDUCE)
    for chunk in replica.data_parallel:
        chunk.start_step()
    # a batch without any label has no loss; 1 keeps the division harmless
    loss_sum = replica.pipeline.train(schedule, inputs, lambda: 1.0 / counted.wait().clamp(min=1.0)[0])
    for chunk in replica.data_parallel:
        chunk.finish_reduce()
    if check_replicas is not None:
        check_replicas()

    with recorder.span(Operation.CLIP):
        # every tp rank of the last stage has the same loss: one of them speaks
        speaks = mesh.is_last_stage and mesh.tp.rank == 0
        shares = torch.stack(
            [replica.optimizer.gradient_square_sum(), loss_sum if speaks else torch.zeros_like(loss_sum)]
        )
        # the host waits for the device here, as it would after the sum: so whatever is asked for until now counts
        is_late = any(chunk.has_late_gradients for chunk in replica.data_parallel)
        own = [*shares.tolist(), float(is_late), *map(float, astuple(requests()))]
        square_sum, loss_total, num_late, *asked = mesh.sum_over_all(shares.new_tensor(own)).tolist()
        if num_late > 0.0:
            square_sum = _add_late_gradients(replica)
    total_tokens = int(counted.wait()[0].item())
    grad_norm = math.sqrt(square_sum) if square_sum >= 0.0 else math.nan
    loss = loss_total / max(total_tokens, 1)
    is_skipped = not (math.isfinite(grad_norm) and math.isfinite(loss))
    replica.advance_fp8_scales()  # before the parameters' gathers, which its exchange would queue behind
    if not is_skipped:
        with recorder.span(Operation.OPTIMIZER):
            replica.optimizer.step(lr, _clip_scale(grad_norm, grad_clip))
        replica.pipeline.start_lead(schedule)
    return StepOutcome(loss, grad_norm, is_skipped, Requests(*(count > 0.0 for count in asked)))


def _add_late_gradients(replica: Replica) -> float:
    """Add to all ranks' shares what some rank wrote late. Returns the squared norm of the whole gradient."""
    for chunk in replica.data_parallel:
        chunk.reduce_late_gradients()
    return replica.mesh.sum_over_all(replica.optimizer.gradient_square_sum().reshape(1)).item()


def _clip_scale(grad_norm: float, grad_clip: float) -> float:
    return min(1.0, grad_clip / (grad_norm + 1e-6)) if grad_clip > 0.0 else 1.0
