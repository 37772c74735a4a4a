"""LAMB (arXiv:1904.00962): AdamW's direction, scaled for each logical parameter by ||weight|| / ||update||.

A logical parameter is spread over dp and tp ranks; its two norms are sums over all its boxes, made in one exchange
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
from megatrain.ops.optimizer_step import lamb_apply_, lamb_direction_
from megatrain.optim.state import ShareState
from megatrain.parallel.placement import PIPELINE_ENDS
from megatrain.parallel.sharding import LogicalParameter


def lamb_updates_(
    states: Sequence[ShareState],
    gradients: Sequence[Tensor],
    config: OptimizerConfig,
    mesh: Mesh,
    lr: float,
    num_updates: int,
    gradient_scale: float,
) -> None:
    """Update all shares in place with gradients times `gradient_scale`, and their parameters with them.

    num_updates counts this one: 1 for the first. The gradients are used up: the directions take their memory.
    Communication: one all-reduce of two numbers a parameter over dp, then over tp; of the two numbers of those that
    other stages hold too, among these.
    """
    square_sums = [
        lamb_direction_(
            gradient,
            state.master,
            state.exp_avg,
            state.exp_avg_sq,
            state.run_borders,
            state.is_decayed,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            num_updates=num_updates,
            gradient_scale=gradient_scale,
        )
        for state, gradient in zip(states, gradients, strict=True)
    ]
    ratio_R = _trust_ratios(torch.cat(square_sums), states, mesh)
    ratios = ratio_R.split([state.is_decayed.numel() for state in states])
    for state, direction, ratio in zip(states, gradients, ratios, strict=True):
        lamb_apply_(direction, state.master, state.published, state.run_borders, ratio, lr=lr)


def _trust_ratios(sums_R2: Tensor, states: Sequence[ShareState], mesh: Mesh) -> Tensor:
    """Return of each box of each share its parameter's ratio, also where this rank's share holds nothing of it.

    The sums are over the stage. Where it has several copies of a parameter, both come out so many times too large: the
    ratio is the same. Where it has several of some boxes only, the first copy counts.
    Shapes: sums_R2 [R, 2], of this rank's weights and directions; result [R].
    """
    parameters = [logical for state in states for logical in state.bucket.parameters]
    boxes = [(number, box) for number, logical in enumerate(parameters) for box in logical.placements]
    parameter_R = torch.tensor([number for number, _ in boxes], device=sums_R2.device)
    sums_R2[[len(parameters[number].placements) > 1 and box.copies.index > 0 for number, box in boxes]] = 0.0
    sums_P2 = sums_R2.new_zeros(len(parameters), 2).index_add_(0, parameter_R, sums_R2)
    mesh.reduce_over_stage(sums_P2)
    _take_from_first_stages(sums_P2, parameters, mesh)
    weight_R, update_R = sums_P2.sqrt_()[parameter_R].unbind(1)
    is_scaled_R = torch.cat([state.is_decayed for state in states]) & (weight_R > 0) & (update_R > 0)
    return torch.where(is_scaled_R, weight_R / update_R, torch.ones_like(weight_R))


def _take_from_first_stages(sums_P2: Tensor, parameters: Sequence[LogicalParameter], mesh: Mesh) -> None:
    """Replace the sums of parameters that several stages hold by those of the first of them.

    The order in which a collective adds depends on an element's place in the tensor, which differs by stage: they would
    differ in the last bit, and the copies of the weight would drift apart.
    """
    copies_P = [logical.placements[0].copies for logical in parameters]
    of_ends = [row for row, copies in enumerate(copies_P) if copies.group == PIPELINE_ENDS]
    if of_ends:
        first_T2 = sums_P2[of_ends]
        first_T2[[copies_P[row].index > 0 for row in of_ends]] = 0.0
        sums_P2[of_ends] = mesh.embedding.all_reduce(first_T2, Operation.EMBEDDING_ALL_REDUCE).wait()
