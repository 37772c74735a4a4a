"""The counter of tensor bytes equals the report of torch's own allocator: forward, backward and custom functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from megatrain.planning.peak_tensor_bytes import PeakTensorBytes

MIB = 1 << 20


class Doubled(torch.autograd.Function):
    """Allocates a hidden tensor of 1 MiB in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hidden = torch.ones(MIB // 4)
        return x * 2 + hidden[0] * 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        hidden = torch.ones(2 * MIB // 4)
        return grad * 2 + hidden[0] * 0


def allocator_peak(prof: profile) -> int:
    """Return the most bytes allocated at once, from the allocator's own events."""
    live = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_peak_is_that_of_the_allocator() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 512)

    def step() -> None:
        x = torch.randn(128, 256, requires_grad=True)
        y = functional.gelu(linear(x))
        (y * y.detach().exp()).sum().backward()
        linear.zero_grad()

    step()  # allocated once and kept, as the kernels' own state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    with PeakTensorBytes().include(linear) as memory:
        before = memory.live_bytes
        step()

    assert before == (256 * 512 + 512) * 4
    assert abs(memory.peak_bytes - before - allocator_peak(prof)) < 0.02 * allocator_peak(prof)
    assert memory.live_bytes == before


def test_custom_functions_are_seen_in_both_directions() -> None:
    x = torch.ones(4, requires_grad=True)
    with PeakTensorBytes() as memory:
        y = Doubled.apply(x)
        assert MIB <= memory.peak_bytes < MIB + 4096
        memory.reset_peak()
        y.sum().backward()
        assert 2 * MIB <= memory.peak_bytes < 2 * MIB + 4096
        assert memory.live_bytes < 4096


def test_views_count_once_and_live_as_long_as_the_last_of_them() -> None:
    with PeakTensorBytes() as memory:
        whole = torch.zeros(1000)
        parts = [whole[:10], whole.view(10, 100), whole.detach()]
        assert memory.live_bytes == 4000
        del whole
        assert memory.live_bytes == 4000
        parts.clear()
        assert memory.live_bytes == 0
    assert memory.peak_bytes == 4000


def test_tensors_from_before_are_counted_when_named() -> None:
    module = nn.Linear(8, 8, bias=False)
    module.weight.grad = torch.zeros(8, 8)
    extra = [torch.zeros(16), torch.zeros(16)]
    with PeakTensorBytes().include(module, extra, extra[0]) as memory:
        assert memory.live_bytes == 2 * 256 + 2 * 64
        module.weight.grad = None
        assert memory.live_bytes == 256 + 2 * 64


def test_meta_tensors_and_resized_storages_are_counted() -> None:
    with PeakTensorBytes() as memory:
        meta = torch.zeros(1 << 20, device="meta")
        x = torch.zeros(100)
        x.resize_(1000)
        assert (meta.numel(), memory.live_bytes) == (1 << 20, 4000)
