"""On a GPU each group communicates on a stream of its own, beside compute; what the next kernel awaits goes first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatrain.comm import join, leave
from megatrain.comm.group_creation import create_process_group
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.meeting import Meeting
from megatrain.contracts.process import Process
from tests.helpers.require import require

BYTES = {"tp": 1 << 20, "pp": 2 << 20, "dp": 4 << 20}
"""By group, as many as tell its copies in a trace from those of the others."""


@pytest.fixture
def groups() -> Iterator[dict[str, dist.ProcessGroup]]:
    """Return NCCL's groups of this one rank: two ranks on one GPU are not allowed there."""
    require("gpu", torch.cuda.is_available(), "torch.cuda.is_available() is false on this machine")
    device, store = torch.device("cuda", torch.cuda.current_device()), dist.HashStore()
    join(Meeting(Process(rank=0, world_size=1), store, "streams"))
    yield {name: create_process_group(PlannedGroup(name, (0,)), 0, device, store, timeout_s=60.0) for name in BYTES}
    leave()


def streams(events: list[dict[str, Any]], category: str) -> dict[int, set[int]]:
    """Return the streams of a trace's events of this category, by their bytes, 0 for kernels."""
    found: dict[int, set[int]] = {}
    for event in events:
        if event.get("cat") == category:
            found.setdefault(event["args"].get("bytes", 0), set()).add(event["args"]["stream"])
    return found


def test_each_group_has_a_stream_beside_that_of_compute(groups: dict[str, dist.ProcessGroup], tmp_path: Path) -> None:
    sent = {name: torch.ones(size // 4, device="cuda") for name, size in BYTES.items()}
    received = {name: torch.empty_like(one) for name, one in sent.items()}
    factor = torch.ones(2048, 2048, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        works = [
            dist.all_gather_single(received[name], sent[name], group=group, async_op=True)
            for name, group in groups.items()
        ]
        factor @ factor
        for work in works:
            assert work is not None
            work.wait()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = streams(events, "gpu_memcpy")

    used = [copies[size] for size in BYTES.values()] + list(streams(events, "kernel").values())
    assert [len(one) for one in used] == [1] * (len(BYTES) + 1)
    assert len(set.union(*used)) == len(used)
    for name, one in received.items():
        assert bool((one == 1.0).all()), name


def test_only_data_parallelism_yields(groups: dict[str, dist.ProcessGroup]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    is_urgent = {name: group._get_backend(device).options.is_high_priority_stream for name, group in groups.items()}

    assert is_urgent == {"tp": True, "pp": True, "dp": False}
