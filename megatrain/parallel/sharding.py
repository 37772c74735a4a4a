"""What a rank holds of a logical parameter: its tensor in the model, and flat shards of the state that goes with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megatrain.parallel.boxes import Box


@dataclass(frozen=True, slots=True, eq=False)
class LogicalParameter:
    """A parameter of the single-device model and the box of it that `parameter` holds on this rank."""

    name: str
    parameter: nn.Parameter
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    is_tp_sharded: bool
    """Else every tp rank holds all of it and sees the gradient of its own sequence rows only."""
    is_tied_copy: bool = False
    """The head's copy of a tied embedding, on another stage than the original."""
    is_tied: bool = False

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
