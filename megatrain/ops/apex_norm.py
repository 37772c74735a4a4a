"""LayerNorm and RMSNorm by NVIDIA apex, with the interface of megatrain.ops.normalization.

apex normalizes one tensor. So torch adds the residual before the norm, and autograd adds the gradients of both results.
Compared with megatrain's kernels, that is one more pass over memory in forward and two in backward. The sum, which is
saved for backward, is bitwise the same.
Shapes: S sequence, B micro-batch, H hidden (any dims may come before H).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from megatrain.ops.normalization import layer_norm, rms_norm


class ApexNorms:
    """rms_norm() and layer_norm(), on CUDA only. LayerNorm has no backward for fp64."""

    def __init__(self, apex: ModuleType | PlannedApex) -> None:
        """`apex`: the module that import_apex() returns."""
        self._apex = apex

    def rms_norm(
        self, x_SBH: Tensor, weight_H: Tensor, eps: float, added_SBH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the same as megatrain.ops.normalization.rms_norm."""
        total_SBH = _total(x_SBH, added_SBH)
        return self._apex.fused_rms_norm_affine(total_SBH, weight_H, weight_H.shape, eps), total_SBH

    def layer_norm(
        self, x_SBH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float, added_SBH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the same as megatrain.ops.normalization.layer_norm."""
        total_SBH = _total(x_SBH, added_SBH)
        return self._apex.fused_layer_norm_affine(total_SBH, weight_H, bias_H, weight_H.shape, eps), total_SBH


class PlannedApex:
    """Replaces apex on meta, where nothing is computed.

    Saves the same tensors for backward as megatrain's norms do if torch adds the residual before them.
    """

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
