"""The memory-bound operations, each with its form in plain torch: the timed work, and the bytes that it must move.

Forward cases keep no graph; backward cases compute the gradients of a graph that is made once. Bytes count once for
each tensor that must be read or written, even if an implementation moves more.
Shapes: T tokens, H hidden, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.ops.activation import bias_gelu, bias_swiglu
from megatrain.ops.cross_entropy import CROSS_ENTROPY_ALONE, local_statistics, logits_gradient_, summed_cross_entropy
from megatrain.ops.dropout import residual_dropout
from megatrain.ops.embedding import embedding
from megatrain.ops.linear import add_product_
from megatrain.ops.normalization import layer_norm, rms_norm
from megatrain.ops.optimizer_step import adamw_, lamb_apply_, lamb_direction_
from megatrain.ops.quantization import E4M3, fp8_quantize, fp8_scale
from megatrain.ops.rotary import inverse_frequencies, rotary_table, split_rotated_
from megatrain.ops.square_sums import square_sum

Operation = Callable[..., Tensor | tuple[Tensor, ...]]
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the cases. `vocab_size`: of the cross entropy; `num_weights`: of an optimizer's shard."""

    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab_size: int = 128256
    num_weights: int = 1 << 28


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One measurement. `theirs` makes the plain torch form, given a wrapper: `compiled`, or one that does nothing."""

    name: str
    num_bytes: int
    ours: Callable[[], Work]
    theirs: Callable[[Callable[[Operation], Operation]], Work] | None
    why_not_compiled: str = ""


def compiled(operation: Operation) -> Operation:
    """Return the operation, compiled by torch for the sizes with which it is called."""
    return torch.compile(operation, dynamic=False)


def cases(sizes: Sizes, device: torch.device) -> Iterator[OperatorCase]:
    """Yield the cases. Each makes its tensors when its work is requested."""
    yield from _norm_cases(sizes, device)
    yield from _activation_cases(sizes, device)
    yield from _residual_cases(sizes, device)
    yield from _end_cases(sizes, device)
    yield from _flat_cases(sizes, device)


def products(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, int, dict[str, Callable[[], Work]]]]:
    """Yield the products of a layer's weight gradients: name, FLOP, and ways to add a product to a sum in fp32.

    The first way is megatrain's. The last way is a product without addition, which no other way can beat.
    """
    outputs = {
        "qkv": (sizes.heads + 2 * sizes.kv_heads) * sizes.hidden // sizes.heads,
        "attention out": sizes.hidden,
        "gate and up": 2 * sizes.ffn,
    }
    shapes = {name: (size, sizes.hidden) for name, size in outputs.items()}
    shapes |= {"down": (sizes.hidden, sizes.ffn), "head": (sizes.vocab_size, sizes.hidden)}
    for name, (rows, columns) in shapes.items():
        yield name, 2 * sizes.tokens * rows * columns, _ways_to_add(sizes.tokens, rows, columns, device)


def _ways_to_add(tokens: int, rows: int, columns: int, device: torch.device) -> dict[str, Callable[[], Work]]:
    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        grad, x = _draw(device, tokens, rows), _draw(device, tokens, columns)
        return grad, x, torch.zeros(rows, columns, dtype=torch.float32, device=device)

    def ours() -> Work:
        grad, x, total = tensors()
        return lambda: add_product_(total, grad, x, False)

    def rounded_then_added() -> Work:
        grad, x, total = tensors()
        return lambda: total.add_(grad.t() @ x)

    def product_alone() -> Work:
        grad, x, _ = tensors()
        return lambda: grad.t() @ x

    return {"ours": ours, "product, then sum": rounded_then_added, "product alone": product_alone}


def _pair(name: str, ours: Operation, theirs: Operation, make: Callable[[], list[Tensor]], bytes_each: tuple[int, int],
          ) -> Iterator[OperatorCase]:  # fmt: skip
    """Yield the forward and the backward case of one operation."""
    yield OperatorCase(
        f"{name} forward", bytes_each[0], lambda: _forward(ours, make()), lambda wrap: _forward(wrap(theirs), make())
    )
    yield OperatorCase(
        f"{name} backward", bytes_each[1], lambda: _backward(ours, make()), lambda wrap: _backward(wrap(theirs), make())
    )


def _forward(operation: Operation, inputs: Sequence[Tensor]) -> Work:
    def work() -> None:
        with torch.no_grad():
            operation(*inputs)

    return work


def _backward(operation: Operation, inputs: Sequence[Tensor]) -> Work:
    leaves = [one.requires_grad_() if one.is_floating_point() else one for one in inputs]
    kept: dict[str, list[Tensor]] = {}

    def work() -> None:
        # the graph is made on the stream that is recorded, because backward runs on the stream of its forward
        if not kept:
            out = operation(*leaves)
            outs = [one for one in (out if isinstance(out, tuple) else (out,)) if one.requires_grad]
            kept["outs"], kept["grads"] = outs, [torch.randn_like(one) for one in outs]
        torch.autograd.grad(
            kept["outs"], [one for one in leaves if one.requires_grad], kept["grads"], retain_graph=True
        )

    return work


def _draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _norm_cases(sizes: Sizes, device: torch.device) -> Iterator[OperatorCase]:
    tokens, hidden = sizes.tokens, sizes.hidden
    matrix = 2 * tokens * hidden

    def eager_rms(x: Tensor, weight: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        total = x + added
        return functional.rms_norm(total, weight.shape, weight, 1e-5), total

    def eager_layer(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        total = x + added
        return functional.layer_norm(total, weight.shape, weight, bias, 1e-5), total

    yield from _pair(
        "rms_norm with residual",
        lambda x, weight, added: rms_norm(x, weight, 1e-5, added),
        eager_rms,
        lambda: [_draw(device, tokens, hidden), _draw(device, hidden), _draw(device, tokens, hidden)],
        (4 * matrix, 4 * matrix),
    )
    yield from _pair(
        "layer_norm with residual",
        lambda x, weight, bias, added: layer_norm(x, weight, bias, 1e-5, added),
        eager_layer,
        lambda: [
            _draw(device, tokens, hidden),
            _draw(device, hidden),
            _draw(device, hidden),
            _draw(device, tokens, hidden),
        ],
        (4 * matrix, 4 * matrix),
    )


def _activation_cases(sizes: Sizes, device: torch.device) -> Iterator[OperatorCase]:
    tokens, ffn = sizes.tokens, sizes.ffn
    matrix = 2 * tokens * ffn

    def eager_swiglu(x: Tensor) -> Tensor:
        return functional.silu(x[:, 0]) * x[:, 1]

    def eager_gelu(x: Tensor, bias: Tensor) -> Tensor:
        return functional.gelu(x + bias, approximate="tanh")

    yield from _pair(
        "swiglu",
        lambda x: bias_swiglu(x, None),
        eager_swiglu,
        lambda: [_draw(device, tokens, 2, ffn)],
        (3 * matrix, 5 * matrix),
    )
    yield from _pair(
        "bias and gelu",
        bias_gelu,
        eager_gelu,
        lambda: [_draw(device, tokens, ffn), _draw(device, ffn)],
        (2 * matrix, 3 * matrix),
    )


def _residual_cases(sizes: Sizes, device: torch.device) -> Iterator[OperatorCase]:
    tokens, hidden, groups = sizes.tokens, sizes.hidden, sizes.kv_heads
    head_dim = hidden // sizes.heads
    rows = sizes.heads // groups + 2
    cos, sin = rotary_table(tokens, inverse_frequencies(head_dim, 500000.0), device, torch.float32)
    token_SB = torch.arange(tokens, device=device)[:, None]
    matrix = 2 * tokens * hidden

    def ours(product: Tensor) -> tuple[Tensor, ...]:
        return split_rotated_(product.view_as(product), cos, sin)

    def eager_rotary(product: Tensor) -> tuple[Tensor, ...]:
        q, k, v = product.split((rows - 2, 1, 1), dim=-2)
        table, other = cos[..., None, :], sin[..., None, :]

        def turned(x: Tensor) -> Tensor:
            first, second = x.float().chunk(2, -1)
            return torch.cat([first * table - second * other, second * table + first * other], -1).to(x.dtype)

        return turned(q), turned(k), v.contiguous()

    product_bytes = 2 * tokens * groups * rows * head_dim
    yield OperatorCase(
        "rotary forward, with the split of q, k and v",
        2 * product_bytes,
        lambda: _forward(ours, [_draw(device, tokens, 1, groups, rows, head_dim)]),
        lambda wrap: _forward(wrap(eager_rotary), [_draw(device, tokens, 1, groups, rows, head_dim)]),
    )
    yield from _pair(
        "residual + dropout(y + bias)",
        lambda x, y, bias: residual_dropout(x, y, bias, 0.1, (1, 2), token_SB),
        lambda x, y, bias: x + functional.dropout(y + bias, 0.1),
        lambda: [_draw(device, tokens, 1, hidden), _draw(device, tokens, 1, hidden), _draw(device, hidden)],
        (3 * matrix, 2 * matrix),
    )


def _end_cases(sizes: Sizes, device: torch.device) -> Iterator[OperatorCase]:
    tokens, vocab, hidden = sizes.tokens, sizes.vocab_size, sizes.hidden
    logits_bytes = 2 * tokens * vocab
    labels = torch.randint(0, vocab, (tokens,), device=device)
    ids = torch.randint(0, vocab, (tokens, 1), device=device)

    def eager_loss(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), labels, reduction="sum")

    def our_gradient() -> Work:
        # called directly, because backward overwrites the logits and so a graph could not be replayed
        logits, grad = _draw(device, tokens, vocab), torch.ones(tokens, device=device)
        lse = local_statistics(logits, labels, 0, vocab)[0]
        return lambda: logits_gradient_(logits, labels, lse, grad, 0, vocab, CROSS_ENTROPY_ALONE)

    yield OperatorCase(
        "cross entropy forward",
        logits_bytes,
        lambda: _forward(lambda logits: summed_cross_entropy(logits, labels, vocab), [_draw(device, tokens, vocab)]),
        lambda wrap: _forward(wrap(eager_loss), [_draw(device, tokens, vocab)]),
    )
    yield OperatorCase(
        "cross entropy backward, in place",
        2 * logits_bytes,
        our_gradient,
        lambda wrap: _backward(wrap(eager_loss), [_draw(device, tokens, vocab)]),
    )
    yield from _pair(
        "embedding",
        lambda weight: embedding(ids, weight),
        lambda weight: functional.embedding(ids, weight),
        lambda: [_draw(device, vocab, hidden)],
        (4 * tokens * hidden, 2 * tokens * hidden + 2 * vocab * hidden),
    )


def _flat_cases(sizes: Sizes, device: torch.device) -> Iterator[OperatorCase]:
    count = sizes.num_weights
    rows = count // sizes.hidden

    def our_adamw() -> Work:
        grad, master, exp_avg = (_draw(device, count, dtype=torch.float32) for _ in range(3))
        exp_avg_sq, published = exp_avg.square(), _draw(device, count)
        borders = torch.tensor([0, count // 2, count], device=device)
        is_decayed = torch.tensor([True, False], device=device)
        return lambda: adamw_(
            *(grad, master, exp_avg, exp_avg_sq, published, borders, is_decayed),
            lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, num_updates=3, gradient_scale=0.5,
        )  # fmt: skip

    def their_adamw(_: Callable[[Operation], Operation]) -> Work:
        weight = torch.nn.Parameter(_draw(device, count, dtype=torch.float32))
        weight.grad = torch.randn_like(weight)
        published = _draw(device, count)
        # capturable keeps the number of updates on the GPU; CPUs do not support it
        optimizer = torch.optim.AdamW(
            [weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=device.type == "cuda"
        )

        def step() -> None:
            optimizer.step()
            published.copy_(weight.detach())

        return step

    def their_plain_adamw(wrap: Callable[[Operation], Operation]) -> Work:
        grad, master, exp_avg = (_draw(device, count, dtype=torch.float32) for _ in range(3))
        exp_avg_sq, published = exp_avg.square(), _draw(device, count)
        return _forward(wrap(_plain_adamw), [grad, master, exp_avg, exp_avg_sq, published])

    def our_lamb() -> Work:
        grad, master, exp_avg = (_draw(device, count, dtype=torch.float32) for _ in range(3))
        exp_avg_sq, published = exp_avg.square(), _draw(device, count)
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
    flat = _draw(device, count, dtype=torch.float32)
    yield OperatorCase(
        "squared norm",
        4 * count,
        lambda: lambda: square_sum(flat),
        lambda wrap: _forward(wrap(lambda x: torch.linalg.vector_norm(x).square()), [flat]),
    )
    matrix = _draw(device, rows, sizes.hidden)
    scale = fp8_scale(matrix, E4M3)
    yield OperatorCase(
        "FP8 quantization with the transposed copy",
        4 * count,
        lambda: lambda: fp8_quantize(matrix, scale, E4M3, True, True),
        lambda wrap: _forward(wrap(_eager_quantize), [matrix, scale]),
    )


def _plain_adamw(
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
