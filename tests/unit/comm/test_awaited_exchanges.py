"""While the host waits for an exchange its black box says for which, and only then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.comm import channel as channel_module
from megatrain.comm.channel import Channel
from megatrain.comm.group import Group
from megatrain.comm.queue import CommunicationQueue
from megatrain.contracts.black_box import read_black_box
from megatrain.contracts.black_box_values import Identity
from megatrain.contracts.layout import Layout
from megatrain.contracts.operations import Operation
from megatrain.telemetry.recorder import Recorder, open_recorder


class _Work:
    """An exchange that calls `look` while it is waited for."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def wait(self, *_: Any) -> bool:
        self._look()
        return True

    def is_completed(self) -> bool:
        return False


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    identity = Identity("demo", "main", 1, 0, Layout(dp_size=2), 1, "a")
    return open_recorder(identity, directory=str(tmp_path), run_key="key", num_records=64)


def awaited(recorder: Recorder) -> tuple[int, int, int]:
    """Return group and place that are awaited, and how far the group has come."""
    assert recorder.path is not None
    box = read_black_box(recorder.path)
    group = box.progress.awaited_group
    return group, box.progress.awaited_place, box.groups[group].left if group else -1


def test_a_collective_is_awaited_from_its_wait_on(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    number = recorder.add_group("dp", [0, 1])
    group = Group("dp", (0, 1), 0, CommunicationQueue(recorder), number)
    x = torch.zeros(2)

    def call() -> Any:
        return _Work(lambda: seen.append(awaited(recorder)))

    first, second = (group._start(Operation.DP_ALL_REDUCE, x, x, call) for _ in range(2))
    assert awaited(recorder) == (0, 0, -1)
    first.wait()
    second.wait()
    second.wait()
    assert seen == [(number, 1, 0), (number, 2, 1)]
    assert awaited(recorder) == (number, 2, 2), "the wait is over"


def test_a_message_is_awaited_from_its_wait_on(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    group = Group("pp-forward", (0, 1), 0, CommunicationQueue(recorder))
    link = Channel(group, 1, recorder.add_group("pp-forward", [0, 1]))
    work = _Work(lambda: seen.append(awaited(recorder)))
    monkeypatch.setattr(channel_module.dist, "isend", lambda *_, **__: work)
    sent = link.send(torch.zeros(2), Operation.FORWARD_SEND, chunk=0, microbatch=0)
    assert awaited(recorder) == (0, 0, -1)
    sent.wait()
    assert seen == [(link.number, 1, 0)]
