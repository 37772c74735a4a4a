"""The part of Transformer Engine that megatrain calls, with its signatures and checks (pytorch/module), in plain torch.

Products are rounded to 8 bits with a scale for the tensor, as Float8CurrentScaling does, and computed in fp32. Shapes:
T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Float8CurrentScaling:
    """The recipe of transformer_engine.common.recipe."""


class autocast:  # noqa: N801
    """The context of transformer_engine.pytorch."""

    active: ClassVar[list[Any]] = []

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Any = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self._recipe = recipe if enabled else None

    def __enter__(self) -> autocast:
        self.active.append(self._recipe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.active.pop()


class Linear(nn.Module):
    """The module of transformer_engine.pytorch."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))
        else:
            # a tensor, not a parameter
            self.bias = torch.empty(0, dtype=params_dtype, device=device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        assert isinstance(autocast.active[-1], Float8CurrentScaling), "in 8 bits only within autocast"
        for name, parameter in self.named_parameters():
            assert parameter.device == inp.device, f"{name} is on {parameter.device}"
            assert parameter.dtype == inp.dtype, f"data types must match: {name} is {parameter.dtype}"
        assert inp.shape[-1] == self.in_features
        assert self.weight.shape == (self.out_features, self.in_features)
        for one in (inp, self.weight):
            assert one.shape[:-1].numel() % 8 == 0 == one.shape[-1] % 16, "sizes that FP8 does not support"
        return _Product.apply(self.weight, inp.contiguous(), self.bias if self.use_bias else None)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_OI: Tensor, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        x, weight = _rounded(x_TI, torch.float8_e4m3fn), _rounded(weight_OI, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        ctx.dtype = x_TI.dtype
        out = x @ weight.t()
        return (out if bias_O is None else out + bias_O).to(x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = _rounded(grad_TO, torch.float8_e5m2)
        needs_weight, needs_x, needs_bias = ctx.needs_input_grad
        return (
            (grad.t() @ x).to(ctx.dtype) if needs_weight else None,
            (grad @ weight).to(ctx.dtype) if needs_x else None,
            grad_TO.float().sum(0).to(ctx.dtype) if needs_bias else None,
        )


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    wide = x.float()
    scale = torch.finfo(dtype).max / wide.abs().max()
    return (wide * scale).to(dtype).float() / scale
