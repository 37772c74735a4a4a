"""Delayed scaling: scales from the largest magnitudes that tensors had in the last steps.

Each linear layer has three operands (input, weight and gradient of the result) with one slot each. During a step, slots
collect magnitudes. Between steps the trainer replaces collected_P by its maximum over the stage's ranks and calls
advance(), so that all ranks of the stage use the same scales.
Source: the delayed scaling of FP8 training (arXiv:2209.05433, sec. 3.2; NVIDIA Transformer Engine's recipe).
Shapes: P slots, N steps of history.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.ops.quantization import fp8_scale, scale_for


class DelayedScaling:
    """The history of P slots. While any slot has no magnitude, all scales are computed from the tensors themselves."""

    def __init__(self, formats: list[torch.dtype], history_len: int, device: torch.device) -> None:
        """`formats`: the format of each slot."""
        num_slots = len(formats)
        self.history_PN = torch.zeros(num_slots, history_len, device=device)
        self.collected_P = torch.zeros(num_slots, device=device)
        self._scale_P2 = torch.ones(num_slots, 2, device=device)
        self._largest_P = torch.tensor([torch.finfo(dtype).max for dtype in formats], device=device)
        self._is_primed = False

    @property
    def is_primed(self) -> bool:
        """Whether every slot has a magnitude. If so, scales come from the history, not from the tensors."""
        return self._is_primed

    def slot(self, number: int) -> Slot:
        return Slot(self, number)

    def advance(self) -> None:
        """Add the step's magnitudes to the history, and compute the scales of the next step from the history.

        Magnitudes that are not finite are ignored: they come from a skipped step. A slot without a new magnitude
        repeats the largest of its history.
        """
        seen_P = self.collected_P.where(self.collected_P.isfinite(), 0.0)
        newest_P = seen_P.where(seen_P > 0.0, self.history_PN.amax(1))
        self.history_PN.copy_(self.history_PN.roll(1, 1))
        self.history_PN[:, 0] = newest_P
        self.collected_P.zero_()
        largest_P = self._update_scales()
        if not self._is_primed:  # once primed, always primed: a slot never loses its magnitudes
            self._is_primed = bool((largest_P > 0.0).all())

    def refresh(self) -> None:
        """Compute the scales from the history, after it was loaded from a checkpoint."""
        self._is_primed = bool((self._update_scales() > 0.0).all())

    def _update_scales(self) -> Tensor:
        """Compute the scales, and return the largest magnitude of each slot's history. Shapes: result [P]."""
        largest_P = self.history_PN.amax(1)
        scale_P = scale_for(largest_P, self._largest_P)
        torch.stack([scale_P, 1.0 / scale_P], 1, out=self._scale_P2)
        return largest_P

    def scale_of(self, number: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [scale, 1 / scale] for `x` in slot `number`. Shapes: result [2]."""
        return self._scale_P2[number] if self._is_primed else fp8_scale(x, dtype)

    def collect(self, number: int, largest: Tensor) -> None:
        """Add magnitudes to slot `number`, which keeps the largest."""
        slot = self.collected_P[number]
        torch.maximum(slot, largest.amax(), out=slot)


class Slot:
    """The scaler of one operand (megatrain.ops.fp8_linear.Scaler)."""

    def __init__(self, scaling: DelayedScaling, number: int) -> None:
        self._scaling, self._number = scaling, number

    def scale(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._scaling.scale_of(self._number, x, dtype)

    def observe(self, largest: Tensor) -> None:
        self._scaling.collect(self._number, largest)
