"""Daemons beside a launch: started, started again and told of when they end, and ended with it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain.coordination.settings import EtcdSettings
from megatrain.programs import kept_program
from megatrain_launcher.launch import daemon
from tests.helpers.waiting import wait_until

WAIT_S = 20.0


def install(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> None:
    entry_point = SimpleNamespace(name=name, load=lambda: lambda run, etcd, job: words)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry_point])


def test_a_daemon_that_ends_is_told_of_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    install(monkeypatch, "diagnostics", sys.executable, "-c", "print('up'); raise SystemExit(7)")
    monkeypatch.setattr(kept_program, "_LOOK_S", 0.01)
    monkeypatch.setattr(kept_program, "_FIRST_PAUSE_S", 0.01)

    with daemon.running_daemons(tmp_path, EtcdSettings.of("127.0.0.1:1"), "demo", os.environ, told.append):
        wait_until(lambda: len(told) >= 2, "what is told", WAIT_S)

    log = tmp_path / "logs" / "diagnostics.log"
    assert told[0] == f"diagnostics ended with exit code 7; it is started again in 0 s; see {log}"
    assert log.read_text().count("up\n") >= 2


def test_a_daemon_that_ends_with_the_job_is_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    install(monkeypatch, "diagnostics", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
    monkeypatch.setattr(kept_program, "_LOOK_S", 0.01)

    with daemon.running_daemons(tmp_path, EtcdSettings.of("127.0.0.1:1"), "demo", os.environ, told.append):
        log = tmp_path / "logs" / "diagnostics.log"
        wait_until(lambda: log.exists() and log.read_text() == "up\n", "the daemon", WAIT_S)

    assert told == []
