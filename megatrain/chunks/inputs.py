"""Copies a micro-batch from the host to the device, as the input of the pipeline."""

from __future__ import annotations

import torch

from megatrain.comm.group import Group
from megatrain.model import PatchRows, TokenContext
from megatrain.ops.documents import PackedDocuments
from megatrain.ops.to_device import to_device
from megatrain.parallel.pipeline import PipelineInput


def pipeline_input(
    tp: Group, device: torch.device, tokens_SB: torch.Tensor, labels_SB: torch.Tensor, sample_B: torch.Tensor,
    documents: PackedDocuments | None, pictures: PatchRows | None = None,
) -> PipelineInput:  # fmt: skip
    """Return the pipeline's input on `device`, for a micro-batch on the CPU. The host does not wait.

    pictures: with all patches; only on the first stage. Of these, this rank's rows are copied.
    """
    seq_len = tokens_SB.shape[0]
    context = TokenContext(
        sample_B=to_device(sample_B, device),
        seq_len=seq_len,
        documents=None if documents is None else documents.to(device),
        token_offset=tp.rank * (seq_len // tp.size),
        pictures=None if pictures is None else _own_patches(tp, device, pictures),
    )
    return PipelineInput(to_device(tokens_SB, device), to_device(labels_SB, device), context)


def _own_patches(tp: Group, device: torch.device, pictures: PatchRows) -> PatchRows:
    num_own = len(pictures.patches_PKC) // tp.size
    first = tp.rank * num_own
    own_PKC = pictures.patches_PKC[first : first + num_own]
    return PatchRows(to_device(own_PKC, device), to_device(pictures.place_K, device), first)
