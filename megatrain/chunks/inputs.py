"""Copies a micro-batch from the host to the device, as the input of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from megatrain.comm.device_stream import CudaStream, DeviceStream, Mark, NoStream
from megatrain.comm.group import Group
from megatrain.model import PatchRows, TokenContext
from megatrain.ops.documents import PackedDocuments
from megatrain.ops.to_device import to_device
from megatrain.parallel.pipeline import PipelineInput


class InputCopies:
    """Copies micro-batches to the device on a separate stream.

    So the copies do not wait for earlier work of the device, such as the update of the parameters, and later
    micro-batches are copied while earlier ones are computed.
    """

    def __init__(self, device: torch.device, stream: DeviceStream) -> None:
        self._device = device
        self._stream = stream

    @classmethod
    def to(cls, device: torch.device) -> Self:
        """Return an object that copies to `device`. A CPU has no streams; there, tensors are used as they are."""
        return cls(device, CudaStream(is_urgent=False) if device.type == "cuda" else NoStream(is_urgent=False))

    def start(self, x: Tensor) -> Tensor:
        """Start to copy `x` and return the copy. On a GPU, `x` may change as soon as this returns, if it is not
        pinned."""
        with self._stream.beside_compute():
            return to_device(x, self._device)

    def awaiting(self, copies: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that makes the current stream wait until `copies` are complete. The host does not wait."""
        return partial(self._await, copies, self._stream.mark())

    def _await(self, copies: Sequence[Tensor], copied: Mark) -> None:
        copied.wait()
        self._stream.hand_over(copies)


def pipeline_input(
    tp: Group, copies: InputCopies, tokens_SB: Tensor, labels_SB: Tensor, sample_B: Tensor,
    documents: PackedDocuments | None, pictures: PatchRows | None = None,
) -> PipelineInput:  # fmt: skip
    """Return the pipeline's input for a micro-batch on the CPU, whose copy to the device has started.

    The host does not wait.
    pictures: all patches of the micro-batch, only on the first stage; this rank's part of them is copied.
    """
    started: list[Tensor] = []

    def copy(x: Tensor) -> Tensor:
        started.append(copies.start(x))
        return started[-1]

    seq_len = tokens_SB.shape[0]
    context = TokenContext(
        sample_B=copy(sample_B),
        seq_len=seq_len,
        documents=None if documents is None else documents.copied(copy),
        token_offset=tp.rank * (seq_len // tp.size),
        pictures=None if pictures is None else _own_patches(tp, copy, pictures),
    )
    return PipelineInput(copy(tokens_SB), copy(labels_SB), context, copies.awaiting(started))


def _own_patches(tp: Group, copy: Callable[[Tensor], Tensor], pictures: PatchRows) -> PatchRows:
    num_own = len(pictures.patches_PKC) // tp.size
    first = tp.rank * num_own
    own_PKC = pictures.patches_PKC[first : first + num_own]
    return PatchRows(copy(own_PKC), copy(pictures.place_K), first)
