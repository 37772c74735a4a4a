"""A small configuration, reports with round numbers, a frozen clock, and streams that are terminals."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.reporting import Reporter, StepReport
from megatrain.reporting.sinks import OpenSinks, open_sinks
from megatrain.run_files.run_directory import RunDirectory


class Clock:
    """Seconds that pass when a test advances them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    """A stream that reports whether it is a terminal."""

    def __init__(self, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def terminal() -> Stream:
    return Stream(is_terminal=True)


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.fixture
def make_config() -> Callable[..., Config]:
    def make(**sections: dict[str, Any]) -> Config:
        tables: dict[str, dict[str, Any]] = {
            "model": {"vocab_size": 1000, "seq_len": 64, "hidden_size": 64, "num_layers": 2, "num_heads": 4},
            "batch": {"global_batch_size": 8},
            "train": {"steps": 10},
            "optimizer": {"lr": 3e-4},
            "log": {"interval": 3},
        }
        for name, values in sections.items():
            tables[name] = {**tables.get(name, {}), **values}
        return Config.from_dict(tables)

    return make


@pytest.fixture
def make_step() -> Callable[..., StepReport]:
    def make(step: int, **values: Any) -> StepReport:
        report = StepReport(
            step=step, loss=3.0, grad_norm=0.5, lr=3e-4, duration_s=2.0, data_wait_s=0.25, num_tokens=8000,
            consumed_samples=8 * step, consumed_tokens=8000 * step, global_batch_size=8, is_skipped=False,
            num_skipped=0, memory_bytes=3 << 29, world_size=4,
        )  # fmt: skip
        return replace(report, **values)

    return make


@pytest.fixture
def make_reporter(
    make_config: Callable[..., Config], run_directory: RunDirectory, stream: Stream, clock: Clock
) -> Callable[..., Reporter]:
    def make(
        output: Stream | None = None,
        check_run_lock: Callable[[], None] = lambda: None,
        open_sinks: OpenSinks = open_sinks,
        **sections: dict[str, Any],
    ) -> Reporter:
        device = torch.device("cpu")
        layout = Layout(tp_size=2, dp_size=2)
        config = make_config(**sections)
        return Reporter(
            config, layout, device, run_directory, check_run_lock,
            stream=output or stream, clock=clock, open_sinks=open_sinks,
        )  # fmt: skip

    return make
