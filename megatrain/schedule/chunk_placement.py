"""Which stage holds which part of the model. Only this module defines it.

The model is cut into pp_size * num_chunks parts, the model chunks, counted from the input. Looped: each stage gets one
chunk, from the first stage to the last, and then again from the first. V-shaped: every second pass goes from the last
stage to the first, so with an even number of passes one stage holds both the model's input and its loss.
Source: looped, Narayanan et al. (SC'21); V-shaped, Qi et al., "Pipeline Parallelism with Controllable Memory"
(arXiv:2405.15362).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkPlacement:
    """The stage of every model chunk, and its number on that stage."""

    pp_size: int
    num_chunks: int
    """On each stage."""
    is_v_shaped: bool = False

    @property
    def num_parts(self) -> int:
        return self.pp_size * self.num_chunks

    def model_chunk(self, stage: int, chunk: int) -> int:
        """Return the model chunk that is chunk `chunk` of `stage`."""
        is_reversed = chunk % 2 * self.is_v_shaped
        return chunk * self.pp_size + stage + is_reversed * (self.pp_size - 1 - 2 * stage)

    def stage_and_chunk(self, model_chunk: int) -> tuple[int, int]:
        """Return the stage that holds a model chunk, and the number of the chunk on that stage."""
        chunk, position = divmod(model_chunk, self.pp_size)
        return (self.pp_size - 1 - position if self.is_v_shaped and chunk % 2 else position), chunk

    def is_first(self, stage: int, chunk: int) -> bool:
        """Return whether the chunk takes the model's input."""
        return self.model_chunk(stage, chunk) == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """Return whether the chunk computes the loss."""
        return self.model_chunk(stage, chunk) == self.num_parts - 1

    def neighbor(self, stage: int, chunk: int, step: int) -> int:
        """Return the stage that holds the model chunk `step` further on, modulo the number of model chunks."""
        return self.stage_and_chunk((self.model_chunk(stage, chunk) + step) % self.num_parts)[0]
