"""Exchanges on a GPU run on streams beside compute, are timed where they run, and have their priorities."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatrain.comm import join, leave
from megatrain.comm.device_stream import DeviceStreams
from megatrain.comm.exchange import ExchangeRunner
from megatrain.comm.group import Group
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.nccl import NcclCommunicator, create_process_group
from megatrain.comm.rendezvous import Rendezvous
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import read_black_box
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.contracts.process import Process
from megatrain.run_files.run_directory import black_box_path
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.telemetry.timers import cuda_timer
from tests.helpers.require import require
from tests.helpers.waiting import DEADLINE_S

BYTES = {"tp": 256 << 20, "pp": 512 << 20, "dp": 1024 << 20}
"""By group, a number of bytes that distinguishes its copies in a trace from those of the others."""
ERROR_NS = 100_000
"""The tolerance between our events and the profiler's; docs/reference/events.md states a few microseconds for the
method."""


def planned_group(name: str) -> PlannedGroup:
    return PlannedGroup(name, (0,), axis=name, is_of_replicas=name == "dp")


@pytest.fixture
def connected() -> Iterator[Callable[[Recorder], dict[str, Group]]]:
    """Return a function that creates NCCL's groups of this one rank: NCCL does not allow two ranks on one GPU."""
    require("gpu", torch.cuda.is_available(), "torch.cuda.is_available() is false on this machine")
    device, store = torch.device("cuda", torch.cuda.current_device()), dist.HashStore()
    timeout = timedelta(seconds=DEADLINE_S)
    join(Rendezvous(Process(rank=0, world_size=1), store, "streams"))

    def connect(recorder: Recorder) -> dict[str, Group]:
        runner, streams = ExchangeRunner(recorder), DeviceStreams()
        found = {}
        for name in BYTES:
            planned = planned_group(name)
            group = create_process_group(planned, 0, device, store, timeout)
            communicator = NcclCommunicator(runner, planned, group, timeout, streams)
            found[name] = Group(name, (0,), 0, recorder.add_group(name, [0]), communicator)
        return found

    yield connect
    leave()


def copies(trace: list[dict[str, Any]], category: str) -> dict[int, dict[str, Any]]:
    """Return a trace's events of this category, by their bytes; 0 for kernels."""
    return {one["args"].get("bytes", 0): one for one in trace if one.get("cat") == category}


def test_exchanges_run_beside_compute_with_their_own_times(
    connected: Callable[[Recorder], dict[str, Group]], tmp_path: Path
) -> None:
    identity = Identity("demo", "main", 1, 0, Layout(), 1, "here")
    recorder = open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=64, timer=cuda_timer())
    groups = connected(recorder)
    sent = {name: torch.ones(size // 4, device="cuda") for name, size in BYTES.items()}
    received = {name: torch.empty_like(one) for name, one in sent.items()}
    factor = torch.ones(8192, 8192, device="cuda")
    recorder.set_step(1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        pending = [
            group.all_gather(sent[name], Operation.PARAMS_ALL_GATHER, out=received[name])
            for name, group in groups.items()
        ]
        with recorder.span(Operation.FORWARD_COMPUTE):
            factor @ factor
        for each in pending:
            each.wait()
        torch.cuda.synchronize()
    recorder.complete_step()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copied, kernels = copies(trace, "gpu_memcpy"), copies(trace, "kernel")
    records = read_black_box(black_box_path(tmp_path, "demo", "key", "main", 1, 0)).records
    recorded = {one.num_bytes: one for one in records if one.operation == Operation.PARAMS_ALL_GATHER}

    used = [copied[size]["args"]["stream"] for size in BYTES.values()] + [kernels[0]["args"]["stream"]]
    assert len(set(used)) == len(BYTES) + 1
    for size in BYTES.values():
        assert recorded[size].duration_ns == pytest.approx(copied[size]["dur"] * 1e3, abs=ERROR_NS)
    for name, one in received.items():
        assert bool((one == 1.0).all()), name


def test_only_what_travels_between_replicas_yields() -> None:
    require("gpu", torch.cuda.is_available(), "torch.cuda.is_available() is false on this machine")
    streams = DeviceStreams()
    priorities: dict[str, int] = {}
    for name in BYTES:
        with streams.of(planned_group(name)).after_compute():
            priorities[name] = torch.cuda.current_stream().priority

    assert priorities["tp"] == priorities["pp"] < priorities["dp"] == 0
