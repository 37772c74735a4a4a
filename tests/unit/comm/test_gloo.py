"""gloo's exchanges: which of them run one at a time, the start order of the messages of a swap, and the limit of each
wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
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
