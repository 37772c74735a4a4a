"""Information on the tokens of a forward pass, besides their ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain.ops.documents import PackedDocuments


@dataclass(frozen=True, slots=True)
class PatchRows:
    """The patches of the pictures of a micro-batch that this rank embeds.

    Shapes: patches [P_local, B, C] uint8, C the pixels of a patch by row, each with red, green and blue. first: the
    number of the first of these patches in the picture, 0 unless ranks hold different rows.
    """

    patches_PBC: Tensor
    first: int = 0


@dataclass(frozen=True, slots=True)
class TokenContext:
    """The position of a micro-batch in the training stream.

    Shapes: sample_B [B] int64, the global number of each sequence in the stream, from which dropout masks are drawn.
    documents: the document of each token, or None if attention may cross documents.
    token_offset: the position of this rank's first row of the hidden states. It is 0 unless ranks hold different rows
    (sequence parallelism).
    pictures: only where the encoder is, and only if samples have pictures.
    """

    sample_B: Tensor
    seq_len: int
    documents: PackedDocuments | None = None
    token_offset: int = 0
    pictures: PatchRows | None = None

    def clone(self) -> TokenContext:
        """Return a copy that shares no memory with this context.

        Raises: ValueError when the context has documents, because their bounds differ between micro-batches.
        """
        if self.documents is not None:
            raise ValueError(
                "a context with documents cannot be cloned, because their bounds differ between micro-batches; use "
                "data.has_document_mask=false"
            )
        pictures = self.pictures and replace(self.pictures, patches_PBC=self.pictures.patches_PBC.clone())
        return replace(self, sample_B=self.sample_B.clone(), pictures=pictures)

    def copy_(self, other: TokenContext) -> None:
        """Copy the samples and pictures of `other`. Raises: ValueError when the contexts differ in anything else."""
        if self._form() != other._form():
            raise ValueError(f"a context of {self._form()} cannot copy the samples of {other._form()}")
        self.sample_B.copy_(other.sample_B)
        if self.pictures is not None and other.pictures is not None:
            self.pictures.patches_PBC.copy_(other.pictures.patches_PBC)

    def _form(self) -> str:
        further = "" if self.documents is None else ", documents"
        if self.pictures is not None:
            further += f", patches of shape {list(self.pictures.patches_PBC.shape)}"
        return f"{self.sample_B.numel()} samples, seq_len={self.seq_len}, token_offset={self.token_offset}{further}"

    def token_numbers(self, num_rows: int) -> Tensor:
        """Return the global number of each token in this rank's `num_rows` rows. Shapes: result [num_rows, B]."""
        first, device = self.token_offset, self.sample_B.device
        position_S = torch.arange(first, first + num_rows, dtype=torch.int64, device=device)
        return position_S[:, None] + self.sample_B[None, :] * self.seq_len
