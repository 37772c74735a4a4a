"""A rank's part of a logical parameter: its tensor in the model, and flat shards of its optimizer state."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor, nn

from megatrain.parallel.boxes import Box
from megatrain.parallel.logical_matrices import HiddenWeight
from megatrain.parallel.placement import SOLE_HOLDER, Placement, ShardHolders
from megatrain.parallel.update_rules import BY_ADAMW, UpdateRule


@dataclass(frozen=True, slots=True, eq=False)
class LogicalParameter:
    """A parameter of the single-device model: the tensor with this rank's part of it, and that part's placements.

    placements: one for each box; the boxes lie one after another in the tensor's memory. All placements have the same
    replica group, and all with several holders have the same groups of holders.
    num_writes: how often backward writes to its gradient in each micro-batch: once for each use of the parameter.
    0 if a micro-batch may give it no gradient.
    hidden: the matrices of a hidden weight; None for other parameters.
    is_vector: whether the table of placements marks the parameter as a vector; biases and norms' scales always are.
    """

    parameter: nn.Parameter
    placements: tuple[Placement, ...]
    num_writes: int = 1
    hidden: HiddenWeight | None = None
    rule: UpdateRule = BY_ADAMW
    is_vector: bool = False

    @property
    def name(self) -> str:
        return self.placements[0].name

    @property
    def groups(self) -> tuple[str, tuple[str, ...]]:
        """The names of the groups that the gradient is summed over.

        The first is the replica group; the others are the groups of the holders, of all boxes or of some.
        """
        shared_with = (placement.holders.groups for placement in self.placements if placement.holders.groups)
        return self.placements[0].replica_group, next(shared_with, ())

    @property
    def bucket_key(self) -> Hashable:
        """Parameters of one bucket have the same key: their gradients are summed over the same groups, and the
        optimizer updates them by the same rule."""
        return self.groups, self.rule

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix or an embedding, not a bias or a norm's scale."""
        return not (self.is_vector or self.name.endswith(("bias", "norm.weight")))

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies."""
        return self.rule.decays_all or self.is_matrix


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """One box of a logical parameter, with a tensor of the box's shape (a view of flat optimizer memory).

    holders: the ranks that hold the same shard, and the index of this rank among them.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    holders: ShardHolders = SOLE_HOLDER
