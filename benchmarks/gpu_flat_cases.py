"""The memory-bound operations on flat tensors: the optimizers, the squared norm, FP8 quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu_operator_case import Operation, OperatorCase, Sizes, Work, draw, forward
from megatrain.ops.optimizer_step import adamw_, lamb_apply_, lamb_direction_
from megatrain.ops.quantization import E4M3, fp8_quantize, fp8_scale
from megatrain.ops.square_sums import square_sum


def flat_cases(sizes: Sizes, device: torch.device) -> Iterator[OperatorCase]:
    """Yield the cases of an optimizer's shard and of FP8 quantization."""
    count = sizes.num_weights
    rows = count // sizes.hidden

    def our_adamw() -> Work:
        grad, master, exp_avg = (draw(device, count, dtype=torch.float32) for _ in range(3))
        exp_avg_sq, published = exp_avg.square(), draw(device, count)
        borders = torch.tensor([0, count // 2, count], device=device)
        is_decayed = torch.tensor([True, False], device=device)
        return lambda: adamw_(
            *(grad, master, exp_avg, exp_avg_sq, published, borders, is_decayed),
            lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, num_updates=3, gradient_scale=0.5,
        )  # fmt: skip

    def their_adamw(_: Callable[[Operation], Operation]) -> Work:
        weight = torch.nn.Parameter(draw(device, count, dtype=torch.float32))
        weight.grad = torch.randn_like(weight)
        published = draw(device, count)
        # capturable keeps the number of updates on the GPU; CPUs do not support it
        optimizer = torch.optim.AdamW(
            [weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=device.type == "cuda"
        )

        def step() -> None:
            optimizer.step()
            published.copy_(weight.detach())

        return step

    def their_plain_adamw(wrap: Callable[[Operation], Operation]) -> Work:
        grad, master, exp_avg = (draw(device, count, dtype=torch.float32) for _ in range(3))
        exp_avg_sq, published = exp_avg.square(), draw(device, count)
        return forward(wrap(plain_adamw), [grad, master, exp_avg, exp_avg_sq, published])

    def our_lamb() -> Work:
        grad, master, exp_avg = (draw(device, count, dtype=torch.float32) for _ in range(3))
        exp_avg_sq, published = exp_avg.square(), draw(device, count)
        borders = torch.tensor([0, count // 2, count], device=device)
        is_decayed = torch.tensor([True, False], device=device)
        ratios = torch.ones(2, dtype=torch.float64, device=device)

        def step() -> None:
            lamb_direction_(
                *(grad, master, exp_avg, exp_avg_sq, borders, is_decayed),
                beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1, num_updates=3, gradient_scale=0.5,
            )  # fmt: skip
            lamb_apply_(grad, master, published, borders, ratios, lr=1e-3)

        return step

    yield OperatorCase(
        "AdamW, 30 bytes a weight, beside torch's fused one and a copy", 30 * count, our_adamw, their_adamw,
        why_not_compiled="one kernel already",
    )  # fmt: skip
    yield OperatorCase("AdamW, 30 bytes a weight, beside plain operations", 30 * count, our_adamw, their_plain_adamw)
    yield OperatorCase("LAMB, 42 bytes a weight in its two passes", 42 * count, our_lamb, None)
    flat = draw(device, count, dtype=torch.float32)
    yield OperatorCase(
        "squared norm",
        4 * count,
        lambda: lambda: square_sum(flat),
        lambda wrap: forward(wrap(lambda x: torch.linalg.vector_norm(x).square()), [flat]),
    )
    matrix = draw(device, rows, sizes.hidden)
    scale = fp8_scale(matrix, E4M3)
    yield OperatorCase(
        "FP8 quantization with the transposed copy",
        4 * count,
        lambda: lambda: fp8_quantize(matrix, scale, E4M3, True, True),
        lambda wrap: forward(wrap(_eager_quantize), [matrix, scale]),
    )


def plain_adamw(
    grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, published: Tensor
) -> tuple[Tensor, ...]:
    """The third update of `our_adamw`, with weight decay for all weights."""
    grad = grad * 0.5
    exp_avg.lerp_(grad, 1.0 - 0.9)
    exp_avg_sq.mul_(0.95).addcmul_(grad, grad, value=1.0 - 0.95)
    master.mul_(1.0 - 1e-3 * 0.1)
    root = exp_avg_sq.sqrt().mul_((1.0 - 0.95**3) ** -0.5).add_(1e-8)
    master.addcdiv_(exp_avg, root, value=-1e-3 / (1.0 - 0.9**3))
    published.copy_(master)
    return ()


def _eager_quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    q = (x.float() * scale[0]).clamp(-448.0, 448.0).to(E4M3)
    return q, q.t().contiguous()
