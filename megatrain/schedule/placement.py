"""Which stage holds which part of the model: the one place that knows.

The model is cut into pp_size * num_chunks parts, the model chunks, counted from the input. Looped: the stages are dealt
one chunk each, from the first stage to the last, then again from the first. V-shaped: every second turn goes from the
last stage to the first, so that one stage holds the model's input and its loss.
Source: looped, Narayanan et al. (SC'21); V-shaped, Qi et al., "Pipeline Parallelism with Controllable Memory"
(arXiv:2405.15362).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """The stage and the chunk on it of every model chunk."""

    pp_size: int
    num_chunks: int
    """On each stage."""
    is_v_shaped: bool = False

    @property
    def num_parts(self) -> int:
        return self.pp_size * self.num_chunks

    def model_chunk(self, stage: int, chunk: int) -> int:
        """Return which part of the model is chunk `chunk` of `stage`."""
        turned = chunk % 2 * self.is_v_shaped
        return chunk * self.pp_size + stage + turned * (self.pp_size - 1 - 2 * stage)

    def place(self, model_chunk: int) -> tuple[int, int]:
        """Return the stage that holds a part of the model, and the number of the chunk on it."""
        chunk, turn = divmod(model_chunk, self.pp_size)
        return (self.pp_size - 1 - turn if self.is_v_shaped and chunk % 2 else turn), chunk

    def is_first(self, stage: int, chunk: int) -> bool:
        """Say whether the chunk takes the model's input."""
        return self.model_chunk(stage, chunk) == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        """Say whether the chunk gives the loss."""
        return self.model_chunk(stage, chunk) == self.num_parts - 1

    def neighbour(self, stage: int, chunk: int, step: int) -> int:
        """Return the stage that holds the model chunk `step` further on; before the input comes the loss."""
        return self.place((self.model_chunk(stage, chunk) + step) % self.num_parts)[0]
