"""LayerNorm and RMSNorm by NVIDIA apex, in the form of megatrain.ops.normalization.

apex norms one tensor: the residual is added before, by torch, and autograd adds the gradients of both results. That is
a pass more in each direction than our kernels make; the sum, and so what backward keeps, is the same bits.
Shapes: S sequence, B micro-batch, H hidden (any dims before H will do).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from megatrain.ops.normalization import layer_norm, rms_norm


class ApexNorms:
    """rms_norm() and layer_norm(), on CUDA only. LayerNorm has no backward for fp64."""

    def __init__(self, apex: ModuleType | PlannedApex) -> None:
        """`apex`: what import_apex() gives."""
        self._apex = apex

    def rms_norm(
        self, x_SBH: Tensor, weight_H: Tensor, eps: float, added_SBH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what megatrain.ops.normalization.rms_norm does."""
        total_SBH = _total(x_SBH, added_SBH)
        return self._apex.fused_rms_norm_affine(total_SBH, weight_H, weight_H.shape, eps), total_SBH

    def layer_norm(
        self, x_SBH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float, added_SBH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what megatrain.ops.normalization.layer_norm does."""
        total_SBH = _total(x_SBH, added_SBH)
        return self._apex.fused_layer_norm_affine(total_SBH, weight_H, bias_H, weight_H.shape, eps), total_SBH


class PlannedApex:
    """Stands for apex on meta, where nothing is computed: its norms save what ours do of a sum that is made already."""

    @staticmethod
    def fused_rms_norm_affine(x_SBH: Tensor, weight_H: Tensor, shape: Sequence[int], eps: float) -> Tensor:
        return rms_norm(x_SBH, weight_H, eps)[0]

    @staticmethod
    def fused_layer_norm_affine(
        x_SBH: Tensor, weight_H: Tensor, bias_H: Tensor, shape: Sequence[int], eps: float
    ) -> Tensor:
        return layer_norm(x_SBH, weight_H, bias_H, eps)[0]


def _total(x: Tensor, added: Tensor | None) -> Tensor:
    return (x if added is None else x + added).contiguous()
