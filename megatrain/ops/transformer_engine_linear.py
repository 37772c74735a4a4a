"""Linear layers in 8-bit floating point by Transformer Engine.

Each scale is computed from the tensor itself (Float8CurrentScaling: E4M3, gradients E5M2), so no state is carried from
step to step. megatrain calls the module Linear, because it is older and more stable than the functions that it uses.
The parameters of the module stay on meta, and each call replaces them by the given weight and bias.
Shapes: T tokens (any dims), I inputs, O outputs (any dims: they are flattened); T, I and O multiples of 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.ops.optional_backends import TransformerEngine


class TransformerEngineLinear:
    """linear() for one projection, on CUDA only.

    It holds the module of Transformer Engine, which keeps quantizers, and is not an nn.Module itself. Otherwise the
    parameters of that module would become parameters of the model.
    """

    def __init__(self, engine: TransformerEngine) -> None:
        self._engine = engine.pytorch
        self._recipe = engine.recipe.Float8CurrentScaling()
        self._module: nn.Module | None = None

    def __call__(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x weight' + bias. Saves x and the weight in 8 bits for backward.

        The weight's gradient is returned to autograd in the weight's dtype, even if the weight has a main_grad
        (megatrain.ops.main_grad). The attribute main_grad of Transformer Engine is not used: some versions read it in
        forward, others in backward.
        Shapes: x [..., I]; weight [*O, I]; bias [*O]; result [..., prod(O)].
        """
        parameters = {"weight": weight_OI.flatten(0, -2)}
        if bias_O is not None:
            parameters["bias"] = bias_O.flatten()
        if self._module is None:
            num_outputs, num_inputs = parameters["weight"].shape
            self._module = self._engine.Linear(
                num_inputs, num_outputs, bias=bias_O is not None, params_dtype=weight_OI.dtype, device="meta"
            )
        with self._engine.autocast(enabled=True, recipe=self._recipe):
            out = functional_call(self._module, parameters, (x_TI.flatten(0, -2),))
        return out.view(*x_TI.shape[:-1], -1)


def planned_transformer_engine_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Replace TransformerEngineLinear on meta: saves as many bytes for backward, and allocates as many in backward.

    Shapes: the same as for TransformerEngineLinear.
    """
    return _Planned.apply(x_TI, weight_OI, bias_O)


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        # the weight is also kept transposed for backward, except on Blackwell and later
        ctx.save_for_backward(_in_8_bits(x_TI), _in_8_bits(weight_OI), _in_8_bits(weight_OI))
        ctx.x_shape, ctx.weight_shape = x_TI.shape, weight_OI.shape
        ctx.bias_shape = None if bias_O is None else bias_O.shape
        return x_TI.new_empty(*x_TI.shape[:-1], weight_OI.shape[:-1].numel())

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        # the saved tensors, and the gradient in 8 bits in both forms, are alive until both gradients are computed
        factors = [*ctx.saved_tensors, _in_8_bits(grad_TO), _in_8_bits(grad_TO)]
        grad_bias = None if ctx.bias_shape is None else grad_TO.new_empty(ctx.bias_shape)
        grad_x, grad_weight = grad_TO.new_empty(ctx.x_shape), grad_TO.new_empty(ctx.weight_shape)
        factors.clear()
        return grad_x, grad_weight, grad_bias


def _in_8_bits(x: Tensor) -> Tensor:
    """Return a tensor with as many bytes as a quantized x."""
    return x.new_empty(x.shape, dtype=torch.uint8)
