"""Command lines in a run directory with the address of etcd."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.contracts.records.job_keys import JobKeys
from tests.helpers.etcd_server import EtcdServers

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("etcd ")]
    assert not left


@pytest.fixture
def run(tmp_path: Path, etcd: EtcdServers, keys: JobKeys, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory, runs/demo below the working directory, with the address of etcd."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "demo" / "coordination" / "endpoint"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"endpoints": etcd.urls, "job": keys.job}))
    return path.parent.parent


@pytest.fixture
def megatrain(capfd: pytest.CaptureFixture[str], run: Path) -> Run:
    """Run a command line; return its output, parsed if it is JSON. `notes` has its stderr."""

    def call(*arguments: object, code: int = 0) -> Any:
        capfd.readouterr()
        found = main([str(word) for word in arguments])
        captured = capfd.readouterr()
        assert found == code, captured.err
        call.notes = captured.err  # type: ignore[attr-defined]
        return json.loads(captured.out) if "--json" in arguments and captured.out else captured.out

    return call
