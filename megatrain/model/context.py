"""Information on the tokens of a forward pass, besides their ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain.formatting import count_text
from megatrain.ops.documents import PackedDocuments


@dataclass(frozen=True, slots=True)
class PatchRows:
    """The patches of the pictures of a micro-batch that this rank embeds.

    Shapes: patches [P_local, K, C] uint8, C the pixels of a patch by row, each with red, green and blue; place_K [K]
    int64, the place in the micro-batch of the sample that each picture belongs to, ascending. first: the number of the
    first of these patches in the picture, 0 unless ranks hold different rows.
    """

    patches_PKC: Tensor
    place_K: Tensor
    first: int = 0

    @classmethod
    def of_all(cls, patches_PBC: Tensor) -> PatchRows:
        """Return the pictures of a micro-batch in which each sample has one."""
        return cls(patches_PBC, torch.arange(patches_PBC.shape[1], device=patches_PBC.device))

    def clone(self) -> PatchRows:
        """Return a copy that shares no memory with these."""
        return replace(self, patches_PKC=self.patches_PKC.clone(), place_K=self.place_K.clone())

    def copy_(self, other: PatchRows) -> None:
        """Copy the patches and places of `other`, which must have the same shapes."""
        self.patches_PKC.copy_(other.patches_PKC)
        self.place_K.copy_(other.place_K)


@dataclass(frozen=True, slots=True)
class TokenContext:
    """What the model uses of the tokens of a micro-batch besides their ids.

    Shapes: sample_B [B] int64, the global number of each sequence in the training stream; dropout masks depend on it.
    documents: the document of each token, or None if attention may cross documents.
    token_offset: the position of this rank's first row of the hidden states. It is 0 unless ranks hold different rows
    (sequence parallelism).
    pictures: None on ranks without the encoder, and if no sample has a picture.
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
        pictures = None if self.pictures is None else self.pictures.clone()
        return replace(self, sample_B=self.sample_B.clone(), pictures=pictures)

    def copy_(self, other: TokenContext) -> None:
        """Copy the samples and pictures of `other`.

        Raises: ValueError when the contexts differ in length, offset or shapes, or only one has documents.
        """
        if self._form() != other._form():
            raise ValueError(f"a context of {self._form()} cannot copy a context of {other._form()}")
        self.sample_B.copy_(other.sample_B)
        if self.pictures is not None and other.pictures is not None:
            self.pictures.copy_(other.pictures)

    def _form(self) -> str:
        further = "" if self.documents is None else ", documents"
        if self.pictures is not None:
            further += f", patches of shape {list(self.pictures.patches_PKC.shape)}"
        samples = count_text(self.sample_B.numel(), "sample")
        return f"{samples}, seq_len={self.seq_len}, token_offset={self.token_offset}{further}"

    def token_numbers(self, num_rows: int) -> Tensor:
        """Return the global number of each token in this rank's `num_rows` rows. Shapes: result [num_rows, B]."""
        first, device = self.token_offset, self.sample_B.device
        position_S = torch.arange(first, first + num_rows, dtype=torch.int64, device=device)
        return position_S[:, None] + self.sample_B[None, :] * self.seq_len
