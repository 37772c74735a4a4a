"""Tensors recomputed instead of saved: the same gradients bit by bit, and the memory really freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from megatrain.config.model import ModelConfig
from megatrain.contracts.layout import Layout
from megatrain.model import TokenContext, Transformer
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.recompute import SelectiveRecompute
from megatrain.parallel.tensor_plan import TensorPlan, apply_tensor_plan
from tests.helpers.single_rank import simulated_group

W1 = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W2 = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class CountedModule:
    """A function that records its calls."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        self.num_calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.function(x)


def plain_gradients() -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in (X, W1, W2)]
    x, w1, w2 = leaves
    loss = (torch.sin(x @ w1.t()) @ w2.t()).square().sum()
    return list(torch.autograd.grad(loss, leaves))


def test_gradients_are_the_same_and_the_output_is_not_kept() -> None:
    leaves = [one.clone().requires_grad_() for one in (X, W1, W2)]
    x, w1, w2 = leaves
    recompute = CountedModule(torch.sin)
    selective_recompute = SelectiveRecompute()
    with selective_recompute:
        inner = x @ w1.t()
        y = torch.sin(inner)
        selective_recompute.register(y, inner, recompute)
        loss = (y @ w2.t()).square().sum()
    storage = StorageWeakRef(y.untyped_storage())
    del y

    assert storage.expired()
    assert recompute.num_calls == 0
    gradients = torch.autograd.grad(loss, leaves)
    assert recompute.num_calls == 1
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain_gradients(), strict=True))


def storage_bytes_kept(run: Callable[[], Tensor]) -> int:
    """Return the bytes that the graph of `run`'s result keeps beside parameters: the sum over distinct storages."""
    found: dict[int, int] = {}

    def note(x: Any) -> None:
        if isinstance(x, Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()

    seen: set[Any] = set()
    waiting = [run().grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                raw = getattr(node, name)
                for one in raw if isinstance(raw, tuple | list) else (raw,):
                    note(getattr(one, "data", None))
    return sum(found.values())


def test_views_of_a_registered_output_are_recomputed_too() -> None:
    x = X.clone().requires_grad_()
    w = W1[:4].clone().requires_grad_()
    recompute = CountedModule(torch.exp)
    selective_recompute = SelectiveRecompute()
    with selective_recompute:
        y = torch.exp(x)
        selective_recompute.register(y, x, recompute)
        out = (y.t() @ y).sum() + (y[1:5, 1:3].sin() * w[:, :2]).sum() + y.view(4, 6).square().sum()
    gradients = torch.autograd.grad(out, [x, w])

    plain_x, plain_w = X.clone().requires_grad_(), W1[:4].clone().requires_grad_()
    z = torch.exp(plain_x)
    plain = (z.t() @ z).sum() + (z[1:5, 1:3].sin() * plain_w[:, :2]).sum() + z.view(4, 6).square().sum()
    expected = torch.autograd.grad(plain, [plain_x, plain_w])
    assert recompute.num_calls == 1, "one computation serves all uses"
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_source_of_an_output_may_be_recomputed_too() -> None:
    """Gather after norm: the source of the second output is the first one, which is not kept either."""
    leaves = [one.clone().requires_grad_() for one in (X, W1, W2)]
    x, w1, w2 = leaves
    first, second = CountedModule(torch.sin), CountedModule(lambda y: torch.cat([y, y.cos()]))
    selective_recompute = SelectiveRecompute()
    with selective_recompute:
        y = torch.sin(x)
        selective_recompute.register(y, x, first)
        z = torch.cat([y, y.cos()])
        selective_recompute.register(z, y, second)
        loss = ((z @ w1.t()) @ w2.t()).sum()
    storages = [StorageWeakRef(one.untyped_storage()) for one in (y, z)]
    del y, z
    assert all(storage.expired() for storage in storages)

    gradients = torch.autograd.grad(loss, leaves)
    plain_x, plain_w1, plain_w2 = (one.clone().requires_grad_() for one in (X, W1, W2))
    plain_y = torch.sin(plain_x)
    plain = ((torch.cat([plain_y, plain_y.cos()]) @ plain_w1.t()) @ plain_w2.t()).sum()
    expected = torch.autograd.grad(plain, [plain_x, plain_w1, plain_w2])
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert first.num_calls == second.num_calls == 1


def test_recomputed_output_is_dropped_after_its_last_use() -> None:
    x, w1, w2 = (one.clone().requires_grad_() for one in (X, W1[:4], W2[:, :4]))
    made: list[StorageWeakRef] = []

    def recompute(source: Tensor) -> Tensor:
        out = torch.exp(source)
        made.append(StorageWeakRef(out.untyped_storage()))
        return out

    selective_recompute = SelectiveRecompute()
    with selective_recompute:
        y = torch.exp(x.detach())
        selective_recompute.register(y, x.detach(), recompute)
        loss = (y @ w1).sum() + (y @ w2).sum()
    del y
    torch.autograd.grad(loss, [w1, w2], retain_graph=True)  # The graph, and with it the function, stays alive.

    assert len(made) == 1
    assert made[0].expired()


def test_outputs_are_registered_only_inside_and_with_gradients() -> None:
    selective_recompute = SelectiveRecompute()
    outside = torch.exp(X)
    selective_recompute.register(outside, X, torch.exp)
    storage = StorageWeakRef(outside.untyped_storage())
    del outside
    assert storage.expired()
    with torch.no_grad(), selective_recompute:
        inside = torch.exp(X)
        selective_recompute.register(inside, X, torch.exp)
        storage = StorageWeakRef(inside.untyped_storage())
        del inside
        assert storage.expired()


def test_recomputing_makes_no_graph() -> None:
    """A recomputation that uses a parameter, as a norm does, runs without gradients even if backward is recorded."""
    scale = W1[:1].clone().requires_grad_()
    w = W1.clone().requires_grad_()
    made: list[Tensor] = []

    def recompute(source: Tensor) -> Tensor:
        made.append(source * scale)
        return made[-1]

    with SelectiveRecompute() as selective_recompute:
        y = X * scale
        selective_recompute.register(y, X, recompute)
        loss = (y @ w.t()).square().sum()
    torch.autograd.grad(loss, w, create_graph=True)

    assert [one.requires_grad for one in made] == [False]


def test_a_registered_output_dies_with_its_last_tensor() -> None:
    with SelectiveRecompute() as selective_recompute:
        y, kept = torch.sin(X.clone().requires_grad_()), X.clone()
        storage, source = (StorageWeakRef(one.untyped_storage()) for one in (y, kept))
        selective_recompute.register(y, kept, torch.sin)
        view = y[1:]
        del y, kept
        assert not storage.expired()
        assert not source.expired()
        del view
        assert storage.expired()
        assert source.expired(), "and its source with it"


def test_outputs_without_memory_are_distinguished() -> None:
    """On meta every tensor has address 0: each is nevertheless identified by its storage."""
    used: list[str] = []

    def recompute(name: str) -> Callable[[Tensor], Tensor]:
        return lambda source: used.append(name) or torch.empty_like(source)

    leaves = [torch.empty(4, 4, device="meta", requires_grad=True) for _ in range(2)]
    with SelectiveRecompute() as selective_recompute:
        registered = [torch.empty(4, 4, device="meta") for _ in range(2)]
        for name, y in zip(("first", "second"), registered, strict=True):
            selective_recompute.register(y, torch.empty(4, 4, device="meta"), recompute(name))
        unknown = torch.empty(4, 4, device="meta")
        first = (registered[0].t() @ leaves[0]).sum()
        second = (registered[1] @ leaves[1]).sum() + (unknown @ leaves[1]).sum()
        del y, unknown
        storages = [StorageWeakRef(one.untyped_storage()) for one in registered]
        registered.clear()

    assert all(storage.expired() for storage in storages)
    torch.autograd.grad(first, leaves[0])
    assert used == ["first"]
    torch.autograd.grad(second, leaves[1])
    assert used == ["first", "second"], "an output that is not registered is kept itself"


def test_graph_that_never_runs_backward_is_freed() -> None:
    """Operations that save their own output (exp, softmax) must not keep it in a cycle."""
    with SelectiveRecompute():
        y = torch.exp(X.clone().requires_grad_())
        z = y.softmax(-1).sum()
    storage = StorageWeakRef(y.untyped_storage())
    del y, z

    assert storage.expired()


def test_address_used_again_is_not_mistaken() -> None:
    """A tensor at the address of a dead output must be saved as itself."""
    w = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    selective_recompute = SelectiveRecompute()
    for seed in range(20):
        values = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        with selective_recompute:
            selective_recompute.register(values.exp(), values, torch.exp)
            other = values.cos()  # Takes the memory that was just freed, as allocators often do.
            loss = (other @ w).sum()
        del other
        (gradient,) = torch.autograd.grad(loss, w)

        torch.testing.assert_close(gradient, values.cos().sum(0)[:, None].expand(64, 64), rtol=1e-12, atol=1e-12)


def test_several_graphs_may_wait_for_their_backward() -> None:
    """The pipeline runs forwards of several micro-batches before the first backward, in another order."""
    selective_recompute = SelectiveRecompute()
    w = W1.clone().requires_grad_()
    losses = []
    for number in range(4):
        with selective_recompute:
            source = X + number
            y = torch.sin(source)
            selective_recompute.register(y, source, torch.sin)
            losses.append((y @ w.t()).square().sum())
            del y
    found = [torch.autograd.grad(losses[number], w)[0] for number in (2, 0, 3, 1)]

    for number, gradient in zip((2, 0, 3, 1), found, strict=True):
        expected = torch.autograd.grad((torch.sin(X + number) @ w.t()).square().sum(), w)[0]
        assert torch.equal(gradient, expected)


def test_hooks_are_gone_after_an_error() -> None:
    selective_recompute = SelectiveRecompute()
    with pytest.raises(ZeroDivisionError), selective_recompute:
        raise ZeroDivisionError
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        X.clone().requires_grad_().exp()

    assert len(packed) == 1


STYLES: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.1},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "num_kv_heads": 2},
    "parallel": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "block": "parallel", "dropout": 0.1},
}


def planned_model(style: str, recompute: str) -> tuple[Transformer, SelectiveRecompute]:
    sizes: dict[str, Any] = {"vocab_size": 40, "seq_len": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    config = ModelConfig(**(sizes | STYLES[style]))
    model = Transformer(config, dropout_seed=4)
    tp = simulated_group("tp", 1, 0)
    plan = TensorPlan(decoder_table(), Layout(), 0, tp, recompute, config.vocab_size)
    _, selective_recompute = apply_tensor_plan(model, plan)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model, selective_recompute


def run_model(style: str, recompute: str) -> tuple[list[Tensor], int]:
    model, selective_recompute = planned_model(style, recompute)
    tokens = torch.randint(0, 40, (17, 2), generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        with selective_recompute:
            return model(tokens[:-1], TokenContext(torch.arange(2), 16), tokens[1:])

    kept = storage_bytes_kept(loss)
    found = loss()
    return [found.detach(), *torch.autograd.grad(found, list(model.parameters()))], kept


@pytest.mark.parametrize("style", STYLES)
def test_selective_recompute_is_bitwise_equal_with_less_memory(style: str) -> None:
    whole, whole_bytes = run_model(style, "none")
    selective, selective_bytes = run_model(style, "selective")

    assert all(torch.equal(a, b) for a, b in zip(whole, selective, strict=True))
    tokens, hidden_size, ffn_size, num_layers = 16 * 2, 32, 128, 2
    num_norms = num_layers * (1 if style == "parallel" else 2) + 1
    # The tensors that are not kept: the output of each norm and of each activation function.
    saved = 4 * tokens * (num_norms * hidden_size + num_layers * ffn_size)
    assert whole_bytes - selective_bytes == saved


def test_counter_of_kept_bytes_counts_storages_once() -> None:
    x = X.clone().requires_grad_()

    # exp saves its output, which sin saves too; cos saves the output of sin
    assert storage_bytes_kept(lambda: x.exp().sin().cos().sum()) == 2 * X.numel() * 8
    assert storage_bytes_kept(lambda: functional.linear(x, nn.Parameter(W1)).sum()) == (X.numel() + W1.numel()) * 8
