"""The memory-bound operations, each with its form in plain torch: the timed work, and the bytes that it must move.

Forward cases keep no graph; backward cases compute the gradients of a graph that is made once. Bytes count once for
each tensor that must be read or written, even if an implementation moves more.
Shapes: T tokens, H hidden, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_flat_cases import flat_cases
from benchmarks.gpu_operator_case import OperatorCase, Sizes, Work, backward, draw, forward, pair
from megatrain.ops.activation import bias_gelu, bias_swiglu
from megatrain.ops.cross_entropy import CROSS_ENTROPY_ALONE, local_statistics, logits_gradient_, summed_cross_entropy
from megatrain.ops.dropout import residual_dropout
from megatrain.ops.embedding import embedding
from megatrain.ops.linear import add_product_
from megatrain.ops.normalization import layer_norm, rms_norm
from megatrain.ops.rotary import inverse_frequencies, rotary_table, split_rotated_


def cases(sizes: Sizes, device: torch.device) -> Iterator[OperatorCase]:
    """Yield the cases. Each makes its tensors when its work is requested."""
    yield from _norm_cases(sizes, device)
    yield from _activation_cases(sizes, device)
    yield from _residual_cases(sizes, device)
    yield from _end_cases(sizes, device)
    yield from flat_cases(sizes, device)


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
        grad, x = draw(device, tokens, rows), draw(device, tokens, columns)
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


def _norm_cases(sizes: Sizes, device: torch.device) -> Iterator[OperatorCase]:
    tokens, hidden = sizes.tokens, sizes.hidden
    matrix = 2 * tokens * hidden

    def eager_rms(x: Tensor, weight: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        total = x + added
        return functional.rms_norm(total, weight.shape, weight, 1e-5), total

    def eager_layer(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        total = x + added
        return functional.layer_norm(total, weight.shape, weight, bias, 1e-5), total

    yield from pair(
        "rms_norm with residual",
        lambda x, weight, added: rms_norm(x, weight, 1e-5, added),
        eager_rms,
        lambda: [draw(device, tokens, hidden), draw(device, hidden), draw(device, tokens, hidden)],
        (4 * matrix, 4 * matrix),
    )
    yield from pair(
        "layer_norm with residual",
        lambda x, weight, bias, added: layer_norm(x, weight, bias, 1e-5, added),
        eager_layer,
        lambda: [
            draw(device, tokens, hidden),
            draw(device, hidden),
            draw(device, hidden),
            draw(device, tokens, hidden),
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

    yield from pair(
        "swiglu",
        lambda x: bias_swiglu(x, None),
        eager_swiglu,
        lambda: [draw(device, tokens, 2, ffn)],
        (3 * matrix, 5 * matrix),
    )
    yield from pair(
        "bias and gelu",
        bias_gelu,
        eager_gelu,
        lambda: [draw(device, tokens, ffn), draw(device, ffn)],
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
        lambda: forward(ours, [draw(device, tokens, 1, groups, rows, head_dim)]),
        lambda wrap: forward(wrap(eager_rotary), [draw(device, tokens, 1, groups, rows, head_dim)]),
    )
    yield from pair(
        "residual + dropout(y + bias)",
        lambda x, y, bias: residual_dropout(x, y, bias, 0.1, (1, 2), token_SB),
        lambda x, y, bias: x + functional.dropout(y + bias, 0.1),
        lambda: [draw(device, tokens, 1, hidden), draw(device, tokens, 1, hidden), draw(device, hidden)],
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
        logits, grad = draw(device, tokens, vocab), torch.ones(tokens, device=device)
        lse = local_statistics(logits, labels, 0, vocab)[0]
        return lambda: logits_gradient_(logits, labels, lse, grad, 0, vocab, CROSS_ENTROPY_ALONE)

    yield OperatorCase(
        "cross entropy forward",
        logits_bytes,
        lambda: forward(lambda logits: summed_cross_entropy(logits, labels, vocab), [draw(device, tokens, vocab)]),
        lambda wrap: forward(wrap(eager_loss), [draw(device, tokens, vocab)]),
    )
    yield OperatorCase(
        "cross entropy backward, in place",
        2 * logits_bytes,
        our_gradient,
        lambda wrap: backward(wrap(eager_loss), [draw(device, tokens, vocab)]),
    )
    yield from pair(
        "embedding",
        lambda weight: embedding(ids, weight),
        lambda weight: functional.embedding(ids, weight),
        lambda: [draw(device, vocab, hidden)],
        (4 * tokens * hidden, 2 * tokens * hidden + 2 * vocab * hidden),
    )
