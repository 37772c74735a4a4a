"""Activations in host memory: the same numbers bit by bit, device memory really released, in time and in order.

Copies here run at the last moment that a GPU's streams would allow: results are NaN until they are awaited, and
released memory is overwritten at once.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.ops.normalization import ResidualStream
from megatrain.parallel.offload import ImmediateCopies, Offloader
from megatrain.parallel.recompute import SelectiveRecompute
from megatrain.training import rank_model as rank_model_module
from tests.helpers.single_rank import gradients_by_name, make_config, random_tokens, run_gradients, single_rank_model

NOT_A_NUMBER = 0xFF
"""A byte that is part of a NaN in every floating-point type."""
STYLES: dict[str, dict[str, Any]] = {
    "gpt": {"dropout": 0.2},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "num_kv_heads": 2},
    "parallel": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "block": "parallel"},
}


class LateCopies:
    """Copies when a copy is awaited and not before. `story` has the events, with numbers of bytes."""

    def __init__(self) -> None:
        self.story: list[tuple[str, tuple[int, ...]]] = []

    def start_copy_to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        self.story.append(("leave", tuple(source.numel() for source in sources)))
        copies = [torch.full_like(source, NOT_A_NUMBER) for source in sources]
        return copies, self._pending(copies, sources, is_source_free_then=True)

    def start_copy_to_device(self, copies: Sequence[Tensor], copied: Any) -> tuple[list[Tensor], Any]:
        assert not copied[0], "these copies are not on the host yet"
        self.story.append(("come back", tuple(copy.numel() for copy in copies)))
        results = [torch.full_like(copy, NOT_A_NUMBER) for copy in copies]
        return results, self._pending(results, copies, is_source_free_then=False)

    def finish(self, pending: Any) -> None:
        pairs, is_source_free_then = pending
        while pairs:
            result, source = pairs.pop()
            result.copy_(source)
            if is_source_free_then:
                source.fill_(NOT_A_NUMBER)

    def abandon(self, sources: Sequence[Tensor]) -> None:
        self.story.append(("abandon", tuple(source.numel() for source in sources)))

    def _pending(self, results: Sequence[Tensor], sources: Sequence[Tensor], *, is_source_free_then: bool) -> Any:
        return list(zip(results, sources, strict=True)), is_source_free_then

    def times(self, what: str) -> int:
        return [name for name, _ in self.story].count(what)


def run(config_tables: dict[str, dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    config = make_config(**config_tables)
    rank_model = single_rank_model(config)
    losses = [run_gradients(rank_model, random_tokens(config, seed), first_sample=12) for seed in (0, 1)]
    return losses[-1], gradients_by_name(rank_model)


@pytest.mark.slow(kept=["llama-selective-1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("style", STYLES)
def test_offload_changes_no_bit(style: str, recompute: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies()
    monkeypatch.setattr(rank_model_module, "ImmediateCopies", lambda: copies)
    parallel = {"recompute": recompute, "schedule": schedule}
    model = {"num_layers": 4, "hidden_size": 32, **STYLES[style]}
    loss, gradients = run({"model": model, "parallel": parallel})
    assert not copies.story
    for num_offloaded in (1, 3, 4):
        found_loss, found = run({"model": model, "parallel": {**parallel, "offload_layers": num_offloaded}})

        assert found_loss == loss
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
        assert copies.times("leave") == 4 * num_offloaded, "two steps of two micro-batches"
        # In a chunk that offloads all blocks, the last block of the last micro-batch has no time to be copied out.
        stays = {"1f1b": 4, "gpipe": 2}[schedule] if num_offloaded == 4 else 0
        assert copies.times("come back") == 4 * num_offloaded - stays
        copies.story.clear()


@pytest.mark.slow
def test_offload_changes_no_bit_in_bf16_and_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies()
    monkeypatch.setattr(rank_model_module, "ImmediateCopies", lambda: copies)
    tables: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 3, "hidden_size": 64, "seq_len": 16, **STYLES["llama"], "num_kv_heads": 4},
        "train": {"precision": "bf16"},
    }
    for recipe in ("none", "tensorwise", "rowwise"):
        loss, gradients = run({**tables, "fp8": {"recipe": recipe}})
        found_loss, found = run({**tables, "fp8": {"recipe": recipe}, "parallel": {"offload_layers": 2}})

        assert found_loss == loss
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert copies.times("come back") == 3 * 4 * 2


class Doubling(nn.Module):
    """y = x + (tanh(x W))^2, which saves x, tanh's result twice, and W. Records its backward."""

    def __init__(self, number: int, story: list[tuple[str, tuple[int, ...]]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(number)))
        self.made = StorageWeakRef(torch.empty(0).untyped_storage())
        self._number = number
        self._story = story

    def forward(self, stream: ResidualStream) -> ResidualStream:
        x = stream.total()
        y = torch.tanh(x @ self.weight)
        self.made = StorageWeakRef(y.untyped_storage())
        if y.requires_grad:
            y.register_hook(lambda _: self._story.append((f"backward {self._number}", ())))
        return ResidualStream(x, y.t().contiguous().t() * y[:, :])


class Chunk(nn.Module):
    """A sequence of blocks; the first ones offload."""

    def __init__(self, num_blocks: int, num_offloaded: int) -> None:
        super().__init__()
        self.copies = LateCopies()
        self.blocks = nn.ModuleList(Doubling(number, self.copies.story) for number in range(num_blocks))
        self.selective_recompute = SelectiveRecompute()
        if num_offloaded:
            self.offload(num_offloaded)

    def offload(self, num_offloaded: int) -> None:
        offloader = Offloader(self.copies, smallest_numel=16)
        offloader.attach(self, list(self.blocks), num_offloaded)
        self.selective_recompute.keeper = offloader

    def forward(self, x: Tensor) -> Tensor:
        stream = ResidualStream(x)
        with self.selective_recompute:
            for block in self.blocks:
                stream = block(stream)
            return stream.total()


def rows(number: int = 9) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(number))


def test_copies_run_beside_neighboring_blocks_where_useful() -> None:
    chunk = Chunk(4, 2)
    out = chunk(rows() * 1)
    assert [one for one, _ in chunk.copies.story] == ["leave", "leave"]
    out.square().sum().backward()

    names = [name for name, _ in chunk.copies.story[2:]]
    assert names == ["backward 3", "come back", "backward 2", "come back", "backward 1", "backward 0"], (
        "a block's activations start to be copied back when the backward of the next block begins"
    )


@pytest.mark.parametrize("device", ["cpu", "meta"], ids=["memory", "no memory, and so one address"])
def test_each_storage_travels_once_and_weights_stay(device: str) -> None:
    chunk = Chunk(2, 0).to(device)
    chunk.offload(1)
    chunk(rows().to(device) * 1).sum().backward()

    nbytes = 16 * 8 * 4
    # x, tanh's result and its transposed copy; views of the same storage do not count again
    assert chunk.copies.story[0] == ("leave", (nbytes,) * 3)


def test_offloaded_memory_is_freed_after_the_next_block() -> None:
    chunk = Chunk(4, 3)
    alive: list[list[bool]] = []
    for block in chunk.blocks:
        block.register_forward_hook(lambda *_: alive.append([not each.made.expired() for each in chunk.blocks]))
    gc.disable()
    try:
        out = chunk(rows() * 1)
        assert [line[: number + 1] for number, line in enumerate(alive)] == [
            [True],
            [False, True],
            [False, False, True],
            [False, False, False, True],
        ]
        del out  # a graph whose backward never runs
        assert all(block.made.expired() for block in chunk.blocks)
        chunk(rows() * 1).sum().backward()
        assert all(block.made.expired() for block in chunk.blocks)
    finally:
        gc.enable()


def test_backward_of_several_graphs_in_another_order() -> None:
    plain, chunk = Chunk(3, 0), Chunk(3, 2)
    outs = [(plain(rows(number) * 1), chunk(rows(number) * 1)) for number in range(4)]
    for number in (2, 0, 3, 1):
        expected, found = outs[number]
        assert torch.equal(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()

    for parameter, other in zip(plain.parameters(), chunk.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_offloaded_graph_may_run_backward_twice() -> None:
    plain, chunk = Chunk(3, 0), Chunk(3, 2)
    found = []
    for each in (plain, chunk):
        out = each(rows() * 1).square().sum()
        found.append([torch.autograd.grad(out, list(each.parameters()), retain_graph=True) for _ in range(2)])

    for expected, gradients in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))


def test_evaluation_offloads_no_activations() -> None:
    chunk = Chunk(3, 2)
    with torch.no_grad():
        chunk(rows())

    assert not chunk.copies.story


def test_forward_that_fails_leaves_nothing_open() -> None:
    chunk = Chunk(3, 3)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        chunk(torch.ones(4, 5, requires_grad=True))
    before = len(chunk.copies.story)
    outside = torch.randn(16, 8, requires_grad=True)
    with chunk.selective_recompute:
        outside.exp().sum().backward()

    assert len(chunk.copies.story) == before


def test_immediate_copies_return_the_data() -> None:
    copies = ImmediateCopies()
    source = torch.arange(10, dtype=torch.uint8)
    on_host, copied = copies.start_copy_to_host([source])
    source.zero_()
    (back,), arrived = copies.start_copy_to_device(on_host, copied)
    copies.finish(arrived)

    assert back.tolist() == list(range(10))
