"""LAMB (arXiv:1904.00962): AdamW's direction, scaled for each logical parameter by ||weight|| / ||update||.

A logical parameter is spread over dp and tp ranks; its two norms are sums over all its pieces, made in one exchange
for all parameters. Parameters without weight decay (biases, norm scales) keep a ratio of 1, as in NVIDIA's LAMB by
default.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.comm.mesh import Mesh
from megatrain.config.optimizer import OptimizerConfig
from megatrain.contracts.operations import Operation
from megatrain.optim.state import ShareState


def lamb_updates_(
    states: Sequence[ShareState],
    gradients: Sequence[Tensor],
    config: OptimizerConfig,
    mesh: Mesh,
    lr: float,
    num_updates: int,
    gradient_scale: float,
) -> None:
    """Update all shares in place with gradients times `gradient_scale`. `num_updates` counts this one: 1 for the first.

    Communication: one all-reduce of two numbers a parameter over dp, then over tp; of a tied embedding's two numbers
    between the end stages.
    """
    directions = [
        _direction(state, gradient.mul_(gradient_scale), config, num_updates)
        for state, gradient in zip(states, gradients, strict=True)
    ]
    ratios = iter(_trust_ratios(states, directions, mesh))
    for state, direction in zip(states, directions, strict=True):
        for slot in state.parameter_runs:
            ratio = next(ratios)
            if slot is not None:
                direction[slot.run].mul_(ratio if slot.is_decayed else 1.0)
        state.master.add_(direction, alpha=-lr)


def _direction(state: ShareState, gradient: Tensor, config: OptimizerConfig, num_updates: int) -> Tensor:
    state.exp_avg.lerp_(gradient, 1.0 - config.beta1)
    state.exp_avg_sq.mul_(config.beta2).addcmul_(gradient, gradient, value=1.0 - config.beta2)
    denominator = state.exp_avg_sq.sqrt().div_((1.0 - config.beta2**num_updates) ** 0.5).add_(config.eps)
    direction = (state.exp_avg / (1.0 - config.beta1**num_updates)).div_(denominator)
    for run in state.decayed_runs:
        direction[run].add_(state.master[run], alpha=config.weight_decay)
    return direction


def _trust_ratios(states: Sequence[ShareState], directions: Sequence[Tensor], mesh: Mesh) -> list[float]:
    """Return a ratio for each parameter of each share, also for those of which this rank's share holds nothing.

    Of a parameter that every tp rank holds, both sums come out tp_size times too large: the ratio is the same.
    """
    squares: list[Tensor] = []
    zero = torch.zeros(2, dtype=torch.float64, device=states[0].master.device)
    for state, direction in zip(states, directions, strict=True):
        for slot in state.parameter_runs:
            if slot is None:
                squares.append(zero)
            else:
                norms = [torch.linalg.vector_norm(x[slot.run], dtype=torch.float64) for x in (state.master, direction)]
                squares.append(torch.stack(norms).square_())
    sums_P2 = torch.stack(squares)
    mesh.dp.all_reduce(sums_P2, Operation.DP_ALL_REDUCE).wait()
    mesh.tp.all_reduce(sums_P2, Operation.TP_ALL_REDUCE).wait()
    _give_tied_copies_the_same(sums_P2, states, mesh)
    weight_P, update_P = sums_P2.sqrt_().unbind(1)
    ratio_P = torch.where((weight_P > 0) & (update_P > 0), weight_P / update_P, torch.ones_like(weight_P))
    ratios: list[float] = ratio_P.tolist()
    return ratios


def _give_tied_copies_the_same(sums_P2: Tensor, states: Sequence[ShareState], mesh: Mesh) -> None:
    """Replace the sums of a tied embedding's copy by those of the original.

    The order in which a collective adds depends on an element's place in the tensor, which differs by stage: the two
    ends would differ in the last bit, and the copies of the weight would drift apart.
    """
    logical_P = [logical for state in states for logical in state.bucket.parameters]
    tied = [row for row, logical in enumerate(logical_P) if logical.is_tied]
    if tied:
        original_T2 = sums_P2[tied]
        original_T2[[logical_P[row].is_tied_copy for row in tied]] = 0.0
        sums_P2[tied] = mesh.embedding.all_reduce(original_T2, Operation.EMBEDDING_ALL_REDUCE).wait()
