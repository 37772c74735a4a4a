"""gloo's exchanges: which run one at a time, the start order of a swap, limits of waits, and what a black box names."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from megatrain.comm.channel import Channel
from megatrain.comm.exchange import ExchangeRunner
from megatrain.comm.gloo import GlooCommunicator
from megatrain.comm.group import Group
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.lanes import AwaitedLane
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import read_black_box
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.telemetry.recorder import Recorder, open_recorder
from tests.helpers.single_rank import SilentRecorder
from tests.helpers.waiting import DEADLINE_S

RANKS = (4, 6, 8)


class Calls:
    """Replaces torch.distributed: records the started exchanges, and the time limit of each wait."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[str, int]] = []
        self.bounds: list[timedelta | None] = []
        patch.setattr(dist, "isend", lambda _, peer, **__: self._start("send", peer))
        patch.setattr(dist, "irecv", lambda _, peer, **__: self._start("receive", peer))
        patch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *_: None)

    def _start(self, name: str, peer: int) -> Any:
        self.started.append((name, peer))
        return self

    def wait(self, timeout: timedelta | None = None) -> None:
        self.bounds.append(timeout)

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def group_of(new_lane: Callable[[str], AwaitedLane] | None) -> Group:
    """Return a group of three as its second member holds it."""
    planned, stub_group = PlannedGroup("dp", RANKS), dist.ProcessGroup(1, len(RANKS))
    runner: Any = ExchangeRunner(SilentRecorder())
    return Group(
        "dp", RANKS, 1, 0, GlooCommunicator(runner, planned, stub_group, timedelta(seconds=DEADLINE_S), new_lane)
    )


def test_collectives_and_each_link_direction_have_own_lanes(calls: Calls) -> None:
    names: list[str] = []

    def new_lane(name: str) -> AwaitedLane:
        names.append(name)
        return AwaitedLane()

    group, x = group_of(new_lane), torch.zeros(3)
    link = Channel(group, 6, 0)
    for number in range(2):
        link.send(x, Operation.FORWARD_SEND, chunk=0, microbatch=number)
        link.receive((3,), x.dtype, x.device, Operation.FORWARD_RECV, chunk=0, microbatch=number)
        group.all_gather(x, Operation.PARAMS_ALL_GATHER)

    assert names == ["dp-to-6", "dp-from-6", "dp"]


def test_parts_are_received_before_any_is_sent(calls: Calls) -> None:
    group_of(None).reduce_scatter(torch.zeros(6), Operation.GRADS_REDUCE_SCATTER)

    assert calls.started == [("receive", 4), ("receive", 8), ("send", 8), ("send", 4)]


def test_message_has_the_timeout_at_which_it_is_awaited(calls: Calls) -> None:
    group = group_of(None)
    sent = Channel(group, 8, 0).send(torch.zeros(2), Operation.FORWARD_SEND, chunk=0, microbatch=0)
    group.set_timeout(7.0)
    sent.wait()

    assert calls.bounds == [timedelta(seconds=7)]


class _Work:
    """An exchange that calls `on_wait` while the host waits for it."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait

    def wait(self, *_: Any) -> bool:
        self._on_wait()
        return True

    def is_completed(self) -> bool:
        return False


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    identity = Identity("demo", "main", 1, 0, Layout(dp_size=2), 1, "a")
    return open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=64)


def awaited(recorder: Recorder) -> tuple[int, int, int]:
    """Return group and place of the awaited exchange, and the progress of the group."""
    assert recorder.path is not None
    box = read_black_box(recorder.path)
    group = box.progress.awaited_group
    return group, box.progress.awaited_place, box.groups[group].left if group else -1


def group_of_two(name: str, recorder: Recorder, number: int = 0) -> Group:
    planned = PlannedGroup(name, (0, 1))
    stub_group = dist.ProcessGroup(0, 2)
    communicator = GlooCommunicator(ExchangeRunner(recorder), planned, stub_group, timedelta(seconds=DEADLINE_S), None)
    return Group(name, planned.ranks, 0, number, communicator)


def test_a_collective_is_awaited_from_its_wait_on(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    number = recorder.add_group("dp", [0, 1])
    group, x = group_of_two("dp", recorder, number), torch.zeros(2)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: _Work(lambda: seen.append(awaited(recorder))))

    first, second = (group.all_reduce(x, Operation.DP_ALL_REDUCE) for _ in range(2))
    assert awaited(recorder) == (0, 0, -1)
    first.wait()
    second.wait()
    second.wait()
    assert seen == [(number, 1, 0), (number, 2, 1)]
    assert awaited(recorder) == (number, 2, 2), "the wait is over"


def test_a_message_is_awaited_from_its_wait_on(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    link = Channel(group_of_two("pp-forward", recorder), 1, recorder.add_group("pp-forward", [0, 1]))
    work = _Work(lambda: seen.append(awaited(recorder)))
    monkeypatch.setattr(dist, "isend", lambda *_, **__: work)
    sent = link.send(torch.zeros(2), Operation.FORWARD_SEND, chunk=0, microbatch=0)
    assert awaited(recorder) == (0, 0, -1)
    sent.wait()
    assert seen == [(link.number, 1, 0)]
