"""Delayed scaling: scales from the largest magnitudes that tensors had in the last steps.

Each product has three operands with a slot each. Through a step, slots collect magnitudes; between steps whoever trains
makes them those of all ranks (collected_P) and calls `advance`, so that all ranks quantize alike.
Source: the delayed scaling of FP8 training (arXiv:2209.05433, sec. 3.2; NVIDIA Transformer Engine's recipe).
Shapes: P slots, N steps of history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.ops.quantization import fp8_scale, scale_for


class DelayedScaling:
    """The history of P slots. Until a slot has seen a step, its scale is that of the tensor at hand."""

    def __init__(self, formats: list[torch.dtype], history_len: int, device: torch.device) -> None:
        """`formats`: of each slot."""
        num_slots = len(formats)
        self.history_PN = torch.zeros(num_slots, history_len, device=device)
        self.collected_P = torch.zeros(num_slots, device=device)
        self._scale_P2 = torch.ones(num_slots, 2, device=device)
        self._largest_P = torch.tensor([torch.finfo(one).max for one in formats], device=device)
        self._is_primed = False

    @property
    def is_primed(self) -> bool:
        """Whether all slots have seen a step: scales are then taken from the history and not from tensors."""
        return self._is_primed

    def slot(self, number: int) -> Slot:
        return Slot(self, number)

    def advance(self) -> None:
        """Let the step's magnitudes enter the history, and take the scales of the next step from it.

        A magnitude that is not finite belongs to a step that was skipped; what was never seen keeps its slot as it is.
        """
        seen_P = self.collected_P.where(self.collected_P.isfinite(), 0.0)
        newest_P = seen_P.where(seen_P > 0.0, self.history_PN.amax(1))
        self.history_PN.copy_(self.history_PN.roll(1, 1))
        self.history_PN[:, 0] = newest_P
        self.collected_P.zero_()
        largest_P = self._take_scales()
        if not self._is_primed:  # once it is, it stays so: a slot keeps what it has seen
            self._is_primed = bool((largest_P > 0.0).all())

    def refresh(self) -> None:
        """Take scales from the history, as after loading it."""
        self._is_primed = bool((self._take_scales() > 0.0).all())

    def _take_scales(self) -> Tensor:
        """Write the scales. Returns the largest magnitude of each slot's history. Shapes: result [P]."""
        largest_P = self.history_PN.amax(1)
        scale_P = scale_for(largest_P, self._largest_P)
        torch.stack([scale_P, 1.0 / scale_P], 1, out=self._scale_P2)
        return largest_P

    def scale_of(self, number: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [scale, 1 / scale] for `x` in slot `number`. Shapes: result [2]."""
        return self._scale_P2[number] if self._is_primed else fp8_scale(x, dtype)

    def collect(self, number: int, largest: Tensor) -> None:
        """Note magnitudes of slot `number`."""
        slot = self.collected_P[number]
        torch.maximum(slot, largest.amax(), out=slot)


class Slot:
    """One operand's scaler (megatrain.ops.fp8_linear.Scaler)."""

    def __init__(self, scaling: DelayedScaling, number: int) -> None:
        self._scaling, self._number = scaling, number

    def scale(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._scaling.scale_of(self._number, x, dtype)

    def observe(self, largest: Tensor) -> None:
        self._scaling.collect(self._number, largest)
