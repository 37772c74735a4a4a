"""Where documents begin in packed samples, in the forms in which attention asks for it.

Shapes: S sequence, B micro-batch, N documents of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedDocuments:
    """The documents of a micro-batch. A document is a run of equal ids: where the id changes, another one begins.

    Shapes: number_SB [S, B] int32, which document of its sample a token belongs to, counted from 0; starts has a tensor
    [N + 1] int32 for each sample, the first token of each document and S at the end; longest has the tokens of each
    sample's longest document.
    """

    number_SB: Tensor
    starts: tuple[Tensor, ...]
    longest: tuple[int, ...]

    def to(self, device: torch.device) -> PackedDocuments:
        """Return the same on `device`."""
        return PackedDocuments(
            self.number_SB.to(device, non_blocking=True),
            tuple(start.to(device, non_blocking=True) for start in self.starts),
            self.longest,
        )


def pack_documents(document_SB: Tensor) -> PackedDocuments:
    """Return the documents of `document_SB`, any ids on the CPU, where finding borders waits for nothing.

    Shapes: document_SB [S, B].
    """
    if document_SB.dim() != 2 or document_SB.device.type != "cpu":
        raise ValueError(
            f"document_SB must be [S, B] on the CPU, got {list(document_SB.shape)} on {document_SB.device}"
        )
    seq_len, num_samples = document_SB.shape
    is_border = torch.zeros(seq_len, num_samples, dtype=torch.bool)
    is_border[1:] = document_SB[1:] != document_SB[:-1]
    starts = []
    for sample in range(num_samples):
        inner = is_border[:, sample].nonzero()[:, 0]
        starts.append(torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), seq_len)]).to(torch.int32))
    longest = tuple(int(start.diff().max()) for start in starts)
    return PackedDocuments(is_border.cumsum(0, dtype=torch.int32), tuple(starts), longest)
