"""Programs beside a host's workers, and programs of a job: their command lines, restarts, reports and ends."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.config.config import Config
from megatrain.contracts.records.diag_records import DashboardRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain.programs import supervisor
from megatrain_job.commands.etcd_flags import PASSWORD_VARIABLE, etcd_arguments, etcd_environment
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import Credentials, EtcdSettings, TlsFiles
from megatrain_launcher.executor.host_program import ENTRY_POINT_GROUP, start_host_programs
from megatrain_launcher.executor.job_programs import ProgramSettings, reported_dashboard, running_programs
from megatrain_launcher.executor.settings import ExecutorSettings
from tests.helpers.single_rank import make_config
from tests.helpers.waiting import wait_until
from tests.helpers.writer_process import is_alive

PROGRAM = """
import json, os, signal, sys
with open(sys.argv[1], "a") as file:
    report = {"pid": os.getpid(), "arguments": sys.argv[2:], "threads": os.environ.get("OMP_NUM_THREADS"),
            "password": os.environ.get("MEGATRAIN_ETCD_PASSWORD", "")}
    file.write(json.dumps(report) + "\\n")
print("a line of its own", flush=True)
signal.pause()
"""


class ProgramEntry:
    """An entry point whose program records each of its starts in a file."""

    def __init__(self, name: str, notes: Path) -> None:
        self.name, self.notes = name, notes

    def load(self) -> Callable[..., Sequence[str]]:
        if self.name == "broken":
            raise ImportError("no pyarrow")

        def arguments(*, config: Config, run: Path, host: str, logs: Path, etcd: Sequence[str]) -> Sequence[str]:
            if self.name == "idle":
                return []
            reported = [config.job.name, str(run), host, str(logs), *etcd]
            return [sys.executable, "-S", "-c", PROGRAM, str(self.notes), *reported]

        return arguments


@pytest.fixture
def settings(tmp_path: Path) -> ExecutorSettings:
    config = make_config(job={"name": "demo", "run_directory": str(tmp_path / "run")})
    etcd = replace(EtcdSettings.of("127.0.0.1:1,127.0.0.1:2"), credentials=Credentials("ann", "secret"))
    return ExecutorSettings(
        config=config, etcd=etcd, host="host 1", address="127.0.0.1", num_workers=2, min_hosts=1, max_hosts=1,
        feasible_hosts={1: 1}, environment={"PATH": os.environ["PATH"]},
    )  # fmt: skip


@pytest.fixture
def running(
    settings: ExecutorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Programs of which one runs; return a function that returns the command line of each start."""
    notes = tmp_path / "notes"
    entries = [ProgramEntry(name, notes) for name in ("broken", "idle", "streamer")]
    assert ENTRY_POINT_GROUP == "megatrain.host_program"
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if group == ENTRY_POINT_GROUP else [])
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.05)

    def lives() -> list[dict[str, Any]]:
        return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []

    with ExitStack() as closing:
        for program in start_host_programs(settings):
            closing.callback(program.close)
        wait_until(lambda: len(lives()) == 1, "the program")
        yield lives


def test_a_password_of_a_file_is_in_no_environment(settings: ExecutorSettings, tmp_path: Path) -> None:
    with_file = replace(settings.etcd, credentials=Credentials("ann", "secret", tmp_path / "password"))
    assert etcd_environment(settings.etcd) == {PASSWORD_VARIABLE: "secret"}
    assert etcd_environment(with_file) == {}
    assert f"--etcd-password-file={tmp_path / 'password'}" in etcd_arguments(with_file)


def test_program_is_reported_and_ends_with_its_host(
    running: Callable[[], list[dict[str, Any]]], settings: ExecutorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    (life,) = running()
    logs = next(settings.logs.iterdir())
    assert life["arguments"] == [
        *("demo", str(settings.run_directory.root), "host 1", str(logs)),
        *("--rdzv-endpoint=http://127.0.0.1:1,http://127.0.0.1:2", "--etcd-user=ann"),
    ]
    assert (life["password"], life["threads"]) == ("secret", "1"), "a password is never on the command line"
    wait_until(lambda: (logs / "streamer.log").read_text() == "a line of its own\n", "its log")


def test_a_program_that_dies_is_started_again(
    running: Callable[[], list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(running()[0]["pid"], signal.SIGKILL)
    wait_until(lambda: len(running()) == 2, "its second start")
    assert "streamer was killed by SIGKILL (9); it is started again" in caplog.text
    assert not is_alive(running()[0]["pid"])


def test_program_leaves_nothing_when_its_host_leaves(
    settings: ExecutorSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [ProgramEntry("broken", notes), ProgramEntry("streamer", notes)],
    )
    programs = start_host_programs(settings)
    wait_until(notes.exists, "the program")
    wait_until(lambda: bool(notes.read_text()), "its note")
    for program in programs:
        program.close()
    assert not is_alive(json.loads(notes.read_text())["pid"])
    assert "broken cannot be started: ImportError: no pyarrow" in caplog.text


def test_etcd_settings_become_flags_of_a_program(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "ca.pem", tmp_path / "own.pem", tmp_path / "own.key")
    arguments = etcd_arguments(replace(EtcdSettings.of("https://[::1]:5"), tls=files))
    assert arguments == [
        *("--rdzv-endpoint=https://[::1]:5", f"--etcd-cacert={files.ca}"),
        *(f"--etcd-cert={files.certificate}", f"--etcd-key={files.key}"),
    ]


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
