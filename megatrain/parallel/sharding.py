"""What a rank holds of a logical parameter: its tensor in the model, and flat shards of the state that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megatrain.parallel.boxes import Box
from megatrain.parallel.placement import NO_COPIES, Copies, Placement


@dataclass(frozen=True, slots=True, eq=False)
class LogicalParameter:
    """A parameter of the single-device model: the tensor of what this rank holds of it, and where that lies.

    placements: of the boxes that lie end to end in the tensor's memory; all name the same replica group, and those that
    have copies the same ranks.
    """

    parameter: nn.Parameter
    placements: tuple[Placement, ...]

    @property
    def name(self) -> str:
        return self.placements[0].name

    @property
    def groups(self) -> tuple[str, str]:
        """The names of the groups that its gradient is summed over: what may share a bucket agrees in them.

        The second has the copies, of all boxes or of some; "" where there are none.
        """
        with_copies = (placement.copies.group for placement in self.placements if placement.copies.group)
        return self.placements[0].replica_group, next(with_copies, "")

    @property
    def is_decayed(self) -> bool:
        """Weight decay is for matrices and embeddings, not for biases and norm scales."""
        return not self.name.endswith(("bias", "norm.weight"))


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """One box of a logical parameter, with the tensor of that shape (a view of flat optimizer memory).

    copies: the ranks that hold the same, and which of them this one is.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    copies: Copies = NO_COPIES
