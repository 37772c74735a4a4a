"""Every option of [diagnostics] and [dashboard] has its effect in a launched job.

Three jobs: one with other values than the defaults, one that streams nothing, one whose daemon has a separate host.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import partial
from http.client import HTTPConnection
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.dashboard import DashboardConfig
from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.records.diag_records import DaemonRecord, DashboardRecord
from megatrain.contracts.records.host_verdict import (
    Cause,
    HostVerdict,
    OutcomeKind,
    VerdictConfidence,
    VerdictKind,
    VerdictOutcome,
)
from megatrain.contracts.records.record import RecordType, decode, encode
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Gpus, NetworkLinks, Spans, Values
from megatrain_diagnostics.store.daemon_state import DaemonState, read_state
from megatrain_diagnostics.store.reader import StoredEvents
from tests.helpers.notification_topics import write_secret
from tests.helpers.ports import free_ports
from tests.helpers.processes import descendants, words_of
from tests.helpers.recovery_checks import ENDLESS, RunningJob, running_job
from tests.helpers.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

LONG: dict[str, dict[str, Any]] = {"train": {"steps": ENDLESS}}
PACE_S = 0.3
SCRAPER, VIEWER, OPERATOR = "s" * 40, "v" * 40, "o" * 40
PROXY = "127.0.0.5"
GPU_C = 62.0
COST_S = 1e9
STRAGGLER = {"kind": VerdictKind.STRAGGLER, "cause": Cause.COMPUTE, "step_s": 0.05, "gain_s_per_step": 0.04}
NUMERICS = {"kind": VerdictKind.NUMERICS, "cause": Cause.UNKNOWN, "rollback_to": 1, "skip_from": 2, "skip_to": 3}


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A launched job, its settings of both sections, and its observable effects."""

    running: RunningJob
    diagnostics: Mapping[str, Any]
    dashboard: Mapping[str, Any]

    def record(self, kind: type[RecordType], key: str) -> RecordType | None:
        item = self.running.view.client.get(getattr(self.running.view.keys, key))
        return None if item is None else decode(kind, item.value, key)

    def daemon(self) -> DaemonRecord:
        wait_until(lambda: self.record(DaemonRecord, "daemon") is not None, "the daemon's record")
        found = self.record(DaemonRecord, "daemon")
        assert found is not None
        return found

    def programs(self, module: str, host: str = "host-0") -> list[int]:
        children = descendants(self.running.launched.executors[host].pid)
        return [pid for pid in children if module.encode() in words_of(pid)]

    @property
    def events(self) -> StoredEvents:
        return StoredEvents(self.running.job.files.events)

    def first_step(self) -> int:
        steps = self.events.read(Values).step
        return int(steps.min()) if len(steps) else -1

    def state(self) -> DaemonState:
        wait_until(lambda: self._state() is not None, "thresholds in the daemon's state")
        found = self._state()
        assert found is not None
        return found

    def _state(self) -> DaemonState | None:
        found, _ = read_state(self.running.job.files.diagnosis)
        return found if found is not None and found.thresholds is not None else None

    def outcome(self, **content: Any) -> VerdictOutcome:
        """Write a verdict as the daemon does, and return the driver's response."""
        view = self.running.view
        # A job that may shrink begins with one host if the other one is late.
        wait_until(
            lambda: {part.host for part in view.rounds()[-1].hosts} >= set(content.get("hosts", ())),
            "a round with the hosts of the verdict",
        )
        verdict_id = f"20271121-101112-{content['kind']}"
        verdict = HostVerdict(
            verdict_id=verdict_id, round=view.rounds()[-1].number, confidence=VerdictConfidence.HIGH,
            created_unix_s=time.time(), by="test", evidence=("a test",), **content,
        )  # fmt: skip
        view.client.put(view.keys.verdict(verdict_id), encode(verdict))
        return self.outcome_of(lambda one: one.verdict_id == verdict_id)

    def outcome_of(self, is_wanted: Callable[[VerdictOutcome], bool]) -> VerdictOutcome:
        def found() -> list[VerdictOutcome]:
            return [one for one in self.running.view.all("outcomes", VerdictOutcome) if is_wanted(one)]

        wait_until(lambda: bool(found()), "the outcome of a verdict", deadline_s=2 * DEADLINE_S)
        return found()[0]

    def verdict_of(self, outcome: VerdictOutcome) -> HostVerdict:
        verdicts = self.running.view.all("verdicts", HostVerdict)
        return next(verdict for verdict in verdicts if verdict.verdict_id == outcome.verdict_id)

    def page(self, path: str = "/megatrain/api/v1/job", token: str = VIEWER, source: str = "", **headers: str) -> Any:
        """Return the status and the JSON of an answer of the page."""
        headers = {name.replace("_", "-"): text for name, text in headers.items()}
        return answer(self.dashboard["address"], self.dashboard["port"], path, token, source, headers)


def answer(
    address: str, port: int, path: str, token: str = "", source: str = "", headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Return the status of an answer, and its JSON, or its text."""
    place = (source, 0) if source else None
    connection = HTTPConnection(address, port, timeout=DEADLINE_S, source_address=place)
    try:
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", path, headers={**bearer, **(headers or {})})
        response = connection.getresponse()
        body = response.read().decode()
    finally:
        connection.close()
    return response.status, json.loads(body) if body.startswith("{") else body


def full_steps(job: SeenJob) -> set[int]:
    """Return the steps of rank 0 that were streamed with all their spans."""
    spans = job.events.read(Spans, Where(ranks=(0,)))
    return set(spans.step[spans.operation == Operation.STEP.number].tolist())


def sees_sample_period(job: SeenJob) -> None:
    wait_until(lambda: full_steps(job) >= {7, 14, 21}, "the spans of each seventh step")


def sees_spool_mb(job: SeenJob) -> None:
    """The effect needs megabytes that no daemon receives: test_streamer_logs.py tests it."""
    (streamer,) = job.programs("megatrain_diagnostics.streamer")
    assert b'"spool_bytes":3000000' in b" ".join(words_of(streamer)).replace(b" ", b"")


def sees_metrics_of_a_host(job: SeenJob) -> None:
    address, port = job.diagnostics["metrics_address"], job.diagnostics["metrics_port"]
    assert answer(address, port, "/metrics")[0] == 401
    code, text = answer(address, port, "/metrics", SCRAPER)
    assert code == 200
    assert "megatrain_spool_bytes" in text


def sees_metrics_of_the_daemon(job: SeenJob) -> None:
    address, port = job.diagnostics["metrics_address"], job.diagnostics["daemon_metrics_port"]
    assert job.daemon().metrics_port == port
    assert answer(address, port, "/metrics")[0] == 401
    assert "megatrain_job_health" in answer(address, port, "/metrics", SCRAPER)[1]


def sees_dcgm_url(job: SeenJob) -> None:
    wait_until(lambda: GPU_C in job.events.read(Gpus).temperature_c.tolist(), "the exporter's reading")


def sees_thresholds(job: SeenJob) -> None:
    found = job.state().thresholds
    assert found is not None
    assert (found.excess, found.num_steps) == (job.diagnostics["straggler_excess"], job.diagnostics["straggler_steps"])
    assert found.score >= job.diagnostics["straggler_score"]


def sees_loss_jump_factor(job: SeenJob) -> None:
    """The daemon takes half of the usual loss for a jump; with `eviction` dry-run it has no consequence."""
    outcome = job.outcome_of(lambda one: one.kind is OutcomeKind.DRY_RUN)
    assert job.verdict_of(outcome).kind is VerdictKind.NUMERICS
    assert "times the median" in job.verdict_of(outcome).evidence[0]


def sees_retention_hours(job: SeenJob) -> None:
    """A daemon first removes expired data: the events of a day ago."""
    wait_until(lambda: job.first_step() == 0, "the events of the first step")
    hour = min((job.running.job.files.events / Values.NAME).rglob("*.parquet")).parent
    old = hour.parent.parent / f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%d/%H}"
    shutil.copytree(hour, old)
    (daemon,) = job.programs("megatrain_diagnostics.daemon")
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not old.exists(), "the removal of old events", deadline_s=2 * DEADLINE_S)
    assert job.first_step() == 0


def sees_access(job: SeenJob) -> None:
    assert job.page(token="")[0] == 401
    assert job.page()[1]["role"] == "viewer"
    code, document = job.page(token=OPERATOR)
    assert (code, document["role"]) == (200, "operator")


def sees_proxy(job: SeenJob) -> None:
    assert job.page(token="", X_User="ada", X_Role="operator")[0] == 401
    assert job.page(token="", source=PROXY, X_User="ada", X_Role="operator")[1]["role"] == "operator"
    assert job.page(token="", source=PROXY, X_User="ada")[1]["role"] == "viewer"


def sees_host_names(job: SeenJob) -> None:
    assert job.page(Host="ops.example")[0] == 200
    assert job.page(Host="other.example")[0] == 403


def equals(found: Callable[[SeenJob], object], expected: Callable[[SeenJob], object]) -> Callable[[SeenJob], None]:
    def check(job: SeenJob) -> None:
        assert found(job) == expected(job)

    return check


MOVED: dict[str, Callable[[SeenJob], None]] = {
    "diagnostics.daemon_address": equals(lambda job: job.daemon().address, lambda job: "127.0.0.2"),
    "diagnostics.daemon_port": equals(lambda job: job.daemon().port, lambda job: job.diagnostics["daemon_port"]),
    "diagnostics.sample_period": sees_sample_period,
    "diagnostics.spool_mb": sees_spool_mb,
    "diagnostics.metrics_address": sees_metrics_of_a_host,
    "diagnostics.metrics_port": sees_metrics_of_a_host,
    "diagnostics.metrics_token_file": sees_metrics_of_a_host,
    "diagnostics.daemon_metrics_port": sees_metrics_of_the_daemon,
    "diagnostics.dcgm_url": sees_dcgm_url,
    "diagnostics.straggler_excess": sees_thresholds,
    "diagnostics.straggler_score": sees_thresholds,
    "diagnostics.straggler_steps": sees_thresholds,
    "diagnostics.loss_jump_factor": sees_loss_jump_factor,
    "diagnostics.eviction": sees_loss_jump_factor,
    "dashboard.address": sees_access,
    "dashboard.port": sees_access,
    "dashboard.viewer_token_file": sees_access,
    "dashboard.operator_token_file": sees_access,
    "dashboard.base_path": sees_access,
    "dashboard.trusted_proxies": sees_proxy,
    "dashboard.user_header": sees_proxy,
    "dashboard.role_header": sees_proxy,
    "dashboard.host_names": sees_host_names,
    "dashboard.enable_actions": equals(lambda job: job.page(token=OPERATOR)[1]["can_act"], lambda job: True),
    "dashboard.perfetto_url": equals(
        lambda job: job.page()[1]["perfetto_url"], lambda job: job.dashboard["perfetto_url"]
    ),
    "diagnostics.retention_hours": sees_retention_hours,
}
"""Option -> its check. The last one kills the daemon."""


@contextmanager
def served_directory(directory: Path) -> Iterator[str]:
    """Serve files on loopback, as NVIDIA's exporter serves its page."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.timeout(900)
def test_each_option_of_a_job_on_one_host(tmp_path: Path) -> None:
    ports = free_ports(4)
    (tmp_path / "exporter").mkdir()
    (tmp_path / "exporter" / "metrics").write_text(f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-0"}} {GPU_C}\n')
    scraper, viewer, operator = (
        write_secret(tmp_path / name, text) for name, text in (("s", SCRAPER), ("v", VIEWER), ("o", OPERATOR))
    )
    with served_directory(tmp_path / "exporter") as exporter:
        diagnostics: dict[str, Any] = {
            "sample_period": 7, "spool_mb": 3, "daemon_address": "127.0.0.2", "daemon_port": ports[0],
            "metrics_address": "127.0.0.3", "metrics_port": ports[1], "daemon_metrics_port": ports[2],
            "metrics_token_file": scraper, "dcgm_url": f"{exporter}/metrics", "retention_hours": 2.0,
            "straggler_excess": 0.25, "straggler_score": 50.0, "straggler_steps": 5, "loss_jump_factor": 0.5,
            "eviction": "dry-run",
        }  # fmt: skip
        dashboard: dict[str, Any] = {
            "address": "127.0.0.4", "port": ports[3], "enable_actions": True, "viewer_token_file": viewer,
            "operator_token_file": operator, "trusted_proxies": PROXY, "user_header": "X-User",
            "role_header": "X-Role", "host_names": "ops.example", "base_path": "/megatrain",
            "perfetto_url": "https://perfetto.example",
        }  # fmt: skip
        settings = {**LONG, "diagnostics": diagnostics, "dashboard": dashboard}
        with running_job(
            tmp_path / "job", settings, hosts=["host-0"], nnodes="1", ranks_per_host=2, pace_s=PACE_S, has_daemon=True
        ) as running:
            job = SeenJob(running, diagnostics, dashboard)
            wait_until(lambda: job.record(DashboardRecord, "dashboard") is not None, "the page's record")
            for option, check in MOVED.items():
                print(option)
                check(job)


ELSEWHERE = {
    "diagnostics.daemon_host", "diagnostics.telemetry_interval_s", "diagnostics.retention_gb",
    "diagnostics.evictions_per_hour", "diagnostics.max_rollbacks", "dashboard.is_served",
}  # fmt: skip


@pytest.mark.timeout(900)
def test_each_option_of_a_job_whose_daemon_has_its_own_host(tmp_path: Path) -> None:
    diagnostics: dict[str, Any] = {
        "daemon_host": "host-1", "telemetry_interval_s": 0.0, "retention_gb": 1e-9, "evictions_per_hour": 0,
        "max_rollbacks": 0, "restart_cost_s": 0.001,
    }  # fmt: skip
    settings = {**LONG, "diagnostics": diagnostics, "dashboard": {"is_served": False, "port": 0}}
    with running_job(tmp_path, settings, nnodes="1:2", pace_s=PACE_S, has_daemon=True) as running:
        job = SeenJob(running, diagnostics, {})
        job.daemon()
        assert [len(job.programs("megatrain_diagnostics.daemon", host)) for host in ("host-0", "host-1")] == [0, 1]
        wait_until(lambda: job.first_step() == 0, "the events of the first step")
        numerics, straggler = job.outcome(**NUMERICS), job.outcome(**STRAGGLER, hosts=(running.other_than_driver(),))
        assert [numerics.kind, straggler.kind] == [OutcomeKind.DECLINED, OutcomeKind.DECLINED]
        assert "diagnostics.max_rollbacks=0" in numerics.reason
        assert "diagnostics.evictions_per_hour" in straggler.reason
        (daemon,) = job.programs("megatrain_diagnostics.daemon", "host-1")
        os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: job.first_step() > 0, "the removal of the oldest events", deadline_s=2 * DEADLINE_S)
        assert len(job.events.read(Gpus).gpu) == len(job.events.read(NetworkLinks).step) == 0
        assert job.programs("megatrain_dashboard", "host-1") == []
        assert job.record(DashboardRecord, "dashboard") is None


PROGRAMS = ("daemon", "dashboard", "streamer")
UNSTREAMED = {"diagnostics.is_streamed", "diagnostics.restart_cost_s"}


@pytest.mark.timeout(900)
def test_each_option_of_a_job_that_streams_nothing(tmp_path: Path) -> None:
    diagnostics: dict[str, Any] = {"is_streamed": False, "restart_cost_s": COST_S}
    settings = {**LONG, "diagnostics": diagnostics}
    with running_job(tmp_path, settings, nnodes="1:2", pace_s=PACE_S, has_daemon=True) as running:
        job = SeenJob(running, diagnostics, {})
        straggler = job.outcome(**STRAGGLER, hosts=(running.other_than_driver(),))
        assert straggler.kind is OutcomeKind.DECLINED
        assert straggler.cost_s is not None
        assert straggler.cost_s >= COST_S
        assert "the gain is less than the cost" in straggler.reason
        programs = [
            job.programs(f"megatrain_diagnostics.{name}", host) for name in PROGRAMS for host in ("host-0", "host-1")
        ]
        assert programs == [[]] * 6
        assert job.record(DaemonRecord, "daemon") is None


def test_no_option_is_missing_here() -> None:
    options = {f"diagnostics.{field.name}" for field in fields(DiagnosticsConfig)}
    options |= {f"dashboard.{field.name}" for field in fields(DashboardConfig)}
    assert MOVED.keys() | ELSEWHERE | UNSTREAMED == options
