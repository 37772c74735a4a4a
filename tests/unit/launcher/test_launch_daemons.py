"""Daemons beside a launch: started, ended with it, and told of when they end before."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain_launcher.launch import daemon
from tests.helpers.waiting import wait_until

WAIT_S = 20.0


def install(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> None:
    entry_point = SimpleNamespace(name=name, load=lambda: lambda run, endpoints, job: words)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry_point])


def test_a_daemon_that_ends_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    install(monkeypatch, "diagnostics", sys.executable, "-c", "raise SystemExit(7)")
    monkeypatch.setattr(daemon, "_LOOK_S", 0.01)

    with daemon.running_daemons(tmp_path, ("127.0.0.1:1",), "demo", os.environ, told.append):
        wait_until(lambda: bool(told), "what is told", WAIT_S)

    assert len(told) == 1
    assert told[0].startswith("diagnostics ended with exit code 7, see ")


def test_a_daemon_that_ends_with_the_job_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    install(monkeypatch, "diagnostics", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
    monkeypatch.setattr(daemon, "_LOOK_S", 0.01)

    with daemon.running_daemons(tmp_path, ("127.0.0.1:1",), "demo", os.environ, told.append):
        log = tmp_path / "logs" / "diagnostics.log"
        wait_until(lambda: log.exists() and log.read_text() == "up\n", "the daemon", WAIT_S)

    assert told == []
