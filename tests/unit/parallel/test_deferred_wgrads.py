"""Deferred wgrads: which computes run when, in which order, and which tensors are kept until then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from megatrain.ops.embedding import embedding
from megatrain.ops.fp8_linear import CurrentScaler, TensorwiseFp8Linear, rowwise_fp8_linear
from megatrain.ops.linear import linear
from megatrain.parallel.data_parallel import ChunkDataParallel
from megatrain.parallel.deferred_wgrads import DeferredWgrads, Wgrads
from tests.helpers.single_rank_buckets import bucket_gradients, put_in_buckets

CPU = torch.device("cpu")
PRODUCTS, SMALL = {"first", "second"}, {"table", "bias"}


class DeferredNet(nn.Module):
    """A table, and two products; the first one has a bias and is followed by an operation that keeps its output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(5, 8))
        self.first = nn.Parameter(torch.empty(6, 8))
        self.bias = nn.Parameter(torch.empty(6))
        self.second = nn.Parameter(torch.empty(3, 6))

    def forward(self, tokens_SB: Tensor) -> Tensor:
        hidden = linear(embedding(tokens_SB, self.table), self.first, self.bias)
        return linear(hidden.tanh(), self.second).square().sum()


def build() -> tuple[DeferredNet, ChunkDataParallel]:
    with torch.device("meta"):
        net = DeferredNet()
    return net, put_in_buckets(net, torch.float32, CPU)


def tokens(microbatch: int) -> Tensor:
    return torch.randint(5, (4, 2), generator=torch.Generator().manual_seed(microbatch))


def backward(net: DeferredNet, chunk: ChunkDataParallel, microbatch: int) -> DeferredWgrads:
    with chunk.wgrads.deferring() as products:
        net(tokens(microbatch)).backward()
    return products


def sums(chunk: ChunkDataParallel, names: set[str]) -> dict[str, Tensor]:
    return {name: gradient.clone() for name, gradient in bucket_gradients(chunk).items() if name in names}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_deferred_wgrads_are_bitwise_equal() -> None:
    net, chunk = build()
    same_net, same = build()
    for step in range(2):  # The second one overwrites the result of the first one.
        chunk.start_step()
        same.start_step()
        waiting = [backward(net, chunk, 10 * step + microbatch) for microbatch in range(3)]
        for microbatch in range(3):
            same_net(tokens(10 * step + microbatch)).backward()
        # Small gradients are complete at once.
        assert_equal(sums(chunk, SMALL), sums(same, SMALL))
        for products in waiting:
            products.carry_out()
        assert_equal(sums(chunk, PRODUCTS | SMALL), sums(same, PRODUCTS | SMALL))


@pytest.mark.parametrize(
    "multiply",
    [linear, TensorwiseFp8Linear(CurrentScaler(), CurrentScaler(), CurrentScaler()), rowwise_fp8_linear],
    ids=["bf16", "fp8 tensorwise", "fp8 rowwise"],
)
def test_fp8_wgrads_are_deferred_too(multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = []
    for is_deferred in (True, False):
        with torch.device("meta"):
            layer = nn.Linear(32, 16, bias=False)
        chunk = put_in_buckets(layer, torch.bfloat16, CPU)
        waiting = []
        for microbatch in range(3):
            generator = torch.Generator().manual_seed(microbatch)
            x = torch.randn(16, 32, dtype=torch.bfloat16, generator=generator, requires_grad=True)
            with chunk.wgrads.deferring() if is_deferred else nullcontext() as products:
                multiply(x, layer.weight).square().sum().backward()
            if products is not None:
                assert len(products) == 1
                waiting.append(products)
        assert not is_deferred or not bucket_gradients(chunk)["weight"].any()
        for products in waiting:
            products.carry_out()
        found.append(bucket_gradients(chunk)["weight"].clone())

    assert found[0].any()
    assert torch.equal(found[0], found[1])


def test_deferred_wgrad_is_not_added_early() -> None:
    net, chunk = build()
    products = backward(net, chunk, 0)

    assert len(products) == 2
    assert not any(one.any() for one in sums(chunk, PRODUCTS).values())
    products.carry_out()
    assert len(products) == 0
    assert all(one.any() for one in sums(chunk, PRODUCTS).values())


def test_undeferred_backward_runs_its_products_at_once() -> None:
    net, chunk = build()
    waiting = backward(net, chunk, 0)
    net(tokens(1)).backward()
    same_net, same = build()
    same_net(tokens(1)).backward()

    assert len(waiting) == 2
    assert_equal(sums(chunk, PRODUCTS), sums(same, PRODUCTS))


def test_deferred_wgrad_keeps_only_its_factors() -> None:
    net, chunk = build()
    saved: dict[str, weakref.ref[torch.UntypedStorage]] = {}

    def note(x: Tensor) -> Tensor:
        saved[f"{tuple(x.shape)}"] = weakref.ref(x.untyped_storage())
        return x.detach()

    with chunk.wgrads.deferring() as products:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            loss = net(tokens(0))
        loss.backward()
    del loss
    # [4, 2, 8] and [4, 2, 6] are inputs of products; [4, 2, 3] is saved by the square, and (4, 2) are the tokens.
    alive = {shape for shape, storage in saved.items() if storage() is not None}
    assert {"(4, 2, 8)", "(4, 2, 6)"} <= alive
    assert not {"(4, 2, 3)", "(4, 2)"} & alive
    held: list[bool] = []
    products.add(lambda: held.extend(saved[shape]() is not None for shape in ("(4, 2, 6)", "(4, 2, 8)")))
    products.carry_out()
    assert held == [False, False]


def test_a_failure_leaves_nothing_deferred() -> None:
    products = Wgrads()
    with pytest.raises(ValueError, match="in backward"), products.deferring():
        raise ValueError("in backward")
    ran: list[int] = []
    products.run(lambda: ran.append(1))

    assert ran == [1]
