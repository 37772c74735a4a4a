"""Where documents begin in packed samples, in the forms that attention needs.

Shapes: S sequence, B micro-batch, N documents of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedDocuments:
    """The documents of a micro-batch. A document is a run of equal ids: where the id changes, the next one begins.

    Shapes: number_SB [S, B] int32, each token's document within its sample, counted from 0; starts: for each sample a
    tensor [N + 1] int32 with the first token of each document, and S at the end; longest: for each sample the number of
    tokens of its longest document.
    """

    number_SB: Tensor
    starts: tuple[Tensor, ...]
    longest: tuple[int, ...]

    def copied(self, copy: Callable[[Tensor], Tensor]) -> PackedDocuments:
        """Return the documents in the copies that `copy` makes of two tensors."""
        starts = copy(torch.cat(self.starts)).split([len(start) for start in self.starts])
        return PackedDocuments(copy(self.number_SB), starts, self.longest)


def pack_documents(document_SB: Tensor) -> PackedDocuments:
    """Return the documents of `document_SB`: a document id (any integer) for each token, on the CPU.

    On a GPU, finding the borders would make the host wait for the device.
    Shapes: document_SB [S, B].
    Raises: ValueError when document_SB is not on the CPU or does not have two dims.
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
