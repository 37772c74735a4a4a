"""Recorders whose black box is in the test's own directory, read back with the reader of contracts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.contracts.black_box.reader import BlackBox, read_black_box
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.run_files.run_directory import black_box_path
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.telemetry.timers import DeviceTimer

IDENTITY = Identity(
    job="demo",
    branch="main",
    round=1,
    rank=2,
    layout=Layout(tp_size=2, pp_size=2, dp_size=1),
    pid=os.getpid(),
    host=os.uname().nodename,
)


class Boxed:
    """A recorder and its file."""

    def __init__(self, directory: Path, num_records: int, timer: DeviceTimer | None) -> None:
        self.path = black_box_path(directory, "demo", "key", "main", 1, 2)
        self.recorder: Recorder = open_recorder(
            IDENTITY, directory=str(directory), run_key="key", num_records=num_records, timer=timer
        )

    def read(self) -> BlackBox:
        return read_black_box(self.path)


@pytest.fixture
def boxed(tmp_path: Path) -> Iterator[Callable[..., Boxed]]:
    """Return a function that opens recorders; they are closed after the test."""
    opened: list[Boxed] = []

    def make(num_records: int = 64, timer: DeviceTimer | None = None) -> Boxed:
        opened.append(Boxed(tmp_path, num_records, timer))
        return opened[-1]

    yield make
    for box in opened:
        box.recorder.close()
