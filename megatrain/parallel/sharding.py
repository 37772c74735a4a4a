"""What a rank holds of a logical parameter: its tensor in the model, and flat shards of the state that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megatrain.parallel.boxes import Box
from megatrain.parallel.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class LogicalParameter:
    """A parameter of the single-device model: the tensor of what this rank holds of it, and where that lies."""

    parameter: nn.Parameter
    placement: Placement

    @property
    def name(self) -> str:
        return self.placement.name

    @property
    def is_decayed(self) -> bool:
        """Weight decay is for matrices and embeddings, not for biases and norm scales."""
        return not self.name.endswith(("bias", "norm.weight"))


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """One box of a logical parameter, with the tensor of that shape (a view of flat optimizer memory)."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    tensor: Tensor
