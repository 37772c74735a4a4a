"""LAMB (arXiv:1904.00962): AdamW's direction, scaled for each logical parameter by ||weight|| / ||update||.

Several dp and tp ranks hold a logical parameter, so its two norms are sums over all its boxes. One all-reduce along
each axis of the stage sums them for all parameters. Biases and norm scales keep a ratio of 1, as NVIDIA's LAMB does by
default for parameters without weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.comm.mesh import Mesh
from megatrain.config.optimizer import OptimizerConfig
from megatrain.contracts.black_box.operations import Operation
from megatrain.ops.optimizer_step import lamb_apply_, lamb_direction_
from megatrain.optim.state import ShardState
from megatrain.parallel.placement import PIPELINE_ENDS


class Lamb:
    """The updates of all shards of LAMB's parameters. Shapes: R boxes of all buckets, P parameters, T tied ones."""

    def __init__(self, states: Sequence[ShardState], config: OptimizerConfig, mesh: Mesh) -> None:
        self._states = tuple(states)
        self._config = config
        self._mesh = mesh
        parameters = [logical for state in states for logical in state.bucket.parameters]
        boxes = [(number, box) for number, logical in enumerate(parameters) for box in logical.placements]
        tied = [
            number for number, logical in enumerate(parameters) if PIPELINE_ENDS in logical.placements[0].holders.groups
        ]
        self._num_parameters = len(parameters)
        # on the device from the start: a step that copied them there would make the host wait for the device
        device = states[0].master.device
        self._parameter_R = torch.tensor([number for number, _ in boxes], device=device)
        self._is_matrix_R = torch.tensor([parameters[number].is_matrix for number, _ in boxes], device=device)
        counts = [len(parameters[number].placements) == 1 or box.holders.index == 0 for number, box in boxes]
        self._counts_R1 = torch.tensor(counts, device=device)[:, None]
        self._tied_T = torch.tensor(tied, device=device) if tied else None

    def update_(self, gradients: Sequence[Tensor], lr: float, num_updates: int, gradient_scale: float) -> None:
        """Update all shards of state in place with gradients times `gradient_scale`, and their parameters too.

        num_updates: the number of this update; the first is 1. The directions overwrite the gradients.
        Communication: one all-reduce of two numbers per parameter along each axis of the stage
        (Mesh.reduce_over_stage). If other stages hold some of the parameters too, one more all-reduce of their two
        numbers over these stages.
        """
        square_sums = [
            lamb_direction_(
                gradient,
                state.master,
                state.of("exp_avg"),
                state.of("exp_avg_sq"),
                state.run_borders,
                state.is_decayed,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                eps=self._config.eps,
                weight_decay=state.rule.weight_decay,
                num_updates=num_updates,
                gradient_scale=gradient_scale,
            )
            for state, gradient in zip(self._states, gradients, strict=True)
        ]
        ratio_R = self._trust_ratios(torch.cat(square_sums))
        ratios = ratio_R.split([state.is_decayed.numel() for state in self._states])
        for state, direction, ratio in zip(self._states, gradients, ratios, strict=True):
            lamb_apply_(direction, state.master, state.published, state.run_borders, ratio, lr=lr * state.rule.lr_scale)

    def _trust_ratios(self, sums_R2: Tensor) -> Tensor:
        """Return the ratio of each box's parameter, for all boxes of all buckets, even those without values in the
        shard.

        The sums are over the stage. If several ranks of a stage hold a whole parameter, both sums are too large by the
        same factor, so the ratio is correct. If several ranks hold only some boxes of it, only the first holder counts.
        Shapes: sums_R2 [R, 2], the square sums of this rank's weights and directions; result [R].
        """
        counted_R2 = sums_R2.where(self._counts_R1, 0.0)
        sums_P2 = sums_R2.new_zeros(self._num_parameters, 2).index_add_(0, self._parameter_R, counted_R2)
        self._mesh.reduce_over_stage(sums_P2)
        if self._tied_T is not None:
            self._take_from_first_stage(sums_P2, self._tied_T)
        weight_R, update_R = sums_P2.sqrt_()[self._parameter_R].unbind(1)
        is_scaled_R = self._is_matrix_R & (weight_R > 0) & (update_R > 0)
        return torch.where(is_scaled_R, weight_R / update_R, torch.ones_like(weight_R))

    def _take_from_first_stage(self, sums_P2: Tensor, tied_T: Tensor) -> None:
        """Replace the sums of parameters that several stages hold by the first stage's sums.

        The order in which a collective adds depends on an element's position in the tensor, which differs by stage.
        Without this, the stages' sums would differ in the last bit, and the copies of the weight would drift apart.
        """
        first_T2 = sums_P2[tied_T]
        if self._mesh.embedding.rank > 0:
            first_T2.zero_()
        sums_P2[tied_T] = self._mesh.embedding.all_reduce(first_T2, Operation.EMBEDDING_ALL_REDUCE).wait()
