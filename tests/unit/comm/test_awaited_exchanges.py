"""Exactly while the host waits for an exchange, its black box names the exchange."""

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
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import read_black_box
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.telemetry.recorder import Recorder, open_recorder
from tests.helpers.waiting import DEADLINE_S


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
