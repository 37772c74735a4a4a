"""The programs of a job: each is started, restarted and reported separately, and all end with the block.

A launch prints the address of its web page, each address once.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain.contracts.records.diag_records import DashboardRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.programs import supervisor
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.executor.job_programs import ProgramSettings, reported_dashboard, running_programs
from tests.helpers.single_rank import make_config
from tests.helpers.waiting import wait_until

STAYS = (sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()")


def install(monkeypatch: pytest.MonkeyPatch, commands: Mapping[str, Sequence[str]]) -> None:
    entry_point = SimpleNamespace(name="diagnosis", load=lambda: lambda *, config, run, etcd: commands)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry_point])
    monkeypatch.setattr(supervisor, "_POLL_S", 0.01)
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.01)


def settings_in(run: Path) -> ProgramSettings:
    return ProgramSettings(make_config(), run, EtcdSettings.of("127.0.0.1:1"), os.environ)


def pids(run: Path, name: str) -> list[int]:
    log = run / "logs" / f"{name}.log"
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_a_program_that_ends_is_reported_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    install(monkeypatch, {"diagnostics": (sys.executable, "-c", "print('up'); raise SystemExit(7)")})

    with running_programs(settings_in(tmp_path), reported.append):
        wait_until(lambda: len(reported) >= 2, "two reports")

    log = tmp_path / "logs" / "diagnostics.log"
    assert reported[0] == f"diagnostics ended with exit code 7; it is started again in 0 s; see {log}"
    assert log.read_text().count("up\n") >= 2


def test_end_of_one_program_leaves_the_other_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    install(monkeypatch, {"diagnostics": STAYS, "dashboard": STAYS})

    with running_programs(settings_in(tmp_path), reported.append):
        wait_until(lambda: pids(tmp_path, "diagnostics") and pids(tmp_path, "dashboard"), "both")
        os.kill(pids(tmp_path, "diagnostics")[0], signal.SIGKILL)
        wait_until(lambda: len(pids(tmp_path, "diagnostics")) == 2, "the next start")
        (page,) = pids(tmp_path, "dashboard")
        os.kill(page, 0)

    assert [text.partition(";")[0] for text in reported] == ["diagnostics was killed by SIGKILL (9)"]
    with pytest.raises(ProcessLookupError):
        os.kill(page, 0)


def test_programs_that_cannot_be_loaded_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> object:
        raise ImportError("no module named x")

    reported: list[str] = []
    entry_point = SimpleNamespace(name="diagnosis", load=load)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry_point])
    with running_programs(settings_in(tmp_path), reported.append):
        pass
    assert reported == ["diagnosis cannot be started: ImportError: no module named x; the job runs without it"]


def record(url: str, session: str, token_file: str = "") -> bytes:
    return encode(DashboardRecord(url=url, session=session, token_file=token_file))


def test_each_address_is_reported_once(client: EtcdClient, keys: JobKeys) -> None:
    reported: list[str] = []
    client.put(keys.dashboard, b"{")  # damaged, and ignored
    with reported_dashboard(client.settings, keys, reported.append):
        client.put(keys.dashboard, record("http://127.0.0.1:8777/", "first"))
        wait_until(lambda: len(reported) == 1, "the address")
        client.put(keys.dashboard, record("http://127.0.0.1:8777/", "second"))
        client.put(keys.dashboard, record("http://127.0.0.1:8778/", "third", "/run/token"))
        wait_until(lambda: len(reported) == 2, "the second address")
    assert reported == [
        "dashboard: http://127.0.0.1:8777/",
        "dashboard: http://127.0.0.1:8778/ (sign in with the token in /run/token)",
    ]
