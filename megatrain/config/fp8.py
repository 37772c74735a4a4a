"""Section [fp8]: matrix multiplications with weights in 8-bit floating point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.config.options import option

DIM_MULTIPLE = 16
"""Every dim of the matrices that torch multiplies in FP8 must be a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Matrix multiplications with weights in 8-bit floating point."""

    recipe: Literal["none", "tensorwise", "rowwise"] = option(
        "none",
        "How the four projections of a layer are multiplied. none: in train.precision. tensorwise: in FP8, with a "
        "scale for each tensor and gradients in E5M2. rowwise: in FP8, with a scale for each row and all matrices "
        "in E4M3: more exact, but slower. Weights, sums, attention, norms and the head keep train.precision. GPUs "
        "need compute capability 8.9 (rowwise: 9.0); CPUs compute the same numbers, slowly.",
    )
    scaling: Literal["current", "delayed"] = option(
        "current",
        "Source of a tensor's scale. current: the tensor itself, which is read once more. delayed (tensorwise): the "
        "largest magnitudes of the last history_len steps, over all ranks; no replica may have an empty micro-batch.",
    )
    history_len: int = option(
        16, "delayed: number of past steps that determine a scale.", unit="steps", minimum=1, maximum=65536
    )
    backend: Literal["megatrain", "transformer_engine"] = option(
        "megatrain",
        "What multiplies in FP8. megatrain: its own quantization and torch's matrix multiplication. "
        "transformer_engine: NVIDIA Transformer Engine (2.9 or later), which must be installed; tensorwise with "
        "current scaling, GPUs only.",
    )
    skip_layers: tuple[int, ...] = option(
        (), "Layers, counted from 0, that keep train.precision; the first and last are the most sensitive.", minimum=0
    )

    @property
    def is_used(self) -> bool:
        return self.recipe != "none"

    def covers(self, layer: int) -> bool:
        """Return whether the layer of that number multiplies in FP8."""
        return self.is_used and layer not in self.skip_layers
