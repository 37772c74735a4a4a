"""One server for many jobs: who may use it, what names refer to, what is open and for how long; and the comparison of
runs."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.programs.stop_signals import STOP_SIGNALS
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.api.compare import differences
from megatrain_dashboard.jobs import open_jobs as open_jobs_module
from megatrain_dashboard.jobs.app import JobsDashboard, make_jobs_app
from megatrain_dashboard.server import DashboardServer, listening_socket
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.runs.catalog import JobCatalog
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from tests.helpers.dashboard_server import (
    FILES,
    OPERATOR_TOKEN,
    PAGE,
    VIEWER_TOKEN,
    PageClient,
    bearer,
    head_of,
    read_head,
    session_headers,
)
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import make_record
from tests.helpers.many_runs import BEGAN_S, demo_config, held, report_steps, write_run
from tests.helpers.recorded_run import write_recorded_run
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until
from tests.helpers.written_job import fill

LATER_S = BEGAN_S + 3600.0
OPEN = DashboardSettings(port=0)
CLOSED = DashboardSettings(port=0, viewer_token=VIEWER_TOKEN, operator_token=OPERATOR_TOKEN)


@dataclass(frozen=True, slots=True)
class ServedJobs(PageClient):
    dashboard: JobsDashboard


@contextmanager
def served_jobs(runs: Path, settings: DashboardSettings = OPEN, period_s: float = 0.05) -> Iterator[ServedJobs]:
    """Run a server of all runs below a directory at any free port."""
    catalog = JobCatalog(runs, period_s=period_s)
    dashboard = make_jobs_app(catalog, settings, files=FILES, clock=lambda: LATER_S)
    with listening_socket(settings) as listening:
        server = DashboardServer(dashboard.app, listening, settings, dashboard)
        try:
            yield ServedJobs(server.port, dashboard)
        finally:
            assert server.close(), "the server did not end"
            dashboard.open_jobs.close()
            catalog.close()


def write_pair(runs: Path) -> Path:
    """Write two runs that finished, one faster and better than the other."""
    write_run(runs / "a", num_steps=60, loss=2.0, has_incident=True)
    other = demo_config("b", optimizer={"lr": 0.5})
    write_run(runs / "b", num_steps=40, loss=1.0, step_s=1.0, config=other)
    return runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs, which a test may change."""
    return write_pair(tmp_path / "runs")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedJobs]:
    """A server of eleven runs, four of which failed, and of a link to another one; no test changes them."""
    runs = write_pair(tmp_path_factory.mktemp("many") / "runs")
    for number in range(8):
        write_run(runs / f"more-{number}", num_steps=12, exit_code=(0, 1)[number % 2])
    write_recorded_run(runs / "reported")
    write_run(runs.parent / "outside")
    (runs / "led").symlink_to(runs.parent / "outside")
    with served_jobs(runs) as served:
        yield served


@pytest.fixture
def stop_signals() -> Iterator[None]:
    """Restore the handlers of stop signals, which the command replaces."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_the_list_leads_to_the_page_of_each_job(runs: Path) -> None:
    with served_jobs(runs) as served:
        assert served.ask("/").headers["location"] == "jobs"
        assert served.ask("/jobs/").headers["location"] == "../jobs"
        assert served.ask("/jobs/a").headers["location"] == "./a/"
        for path in ("/jobs", "/jobs/a/"):
            assert served.ask(path).body == PAGE
        assert served.ask("/jobs/a/assets/app-1a2b3c4d.js").status == 200
        reported = served.ask("/api/v1/jobs").json
        assert [row["name"] for row in reported["jobs"]] == ["a", "b"]
        assert reported["counts"] == {"red": 0, "amber": 0, "green": 0, "ended": 2}
        assert (reported["num_found"], reported["role"]) == (2, "viewer")
        for name in ("a", "b"):
            job = served.ask(f"/jobs/{name}/api/v1/job").json
            assert (job["job"], job["is_recorded"]) == (name, True)
            assert served.ask(f"/jobs/{name}/api/v1/overview").json["state"] == "finished"
        assert served.dashboard.open_jobs.names == ("a", "b")
        served.ask("/jobs/a/api/v1/nothing").assert_refused(404, "no such path")
        served.ask("/api/v1/overview").assert_refused(404)


def test_first_response_of_a_finished_job_is_complete(many: ServedJobs) -> None:
    assert many.ask("/jobs/reported/api/v1/series").json["step"] == list(range(120))
    assert many.ask("/jobs/reported/api/v1/overview").json["checkpoint"] is not None


def test_list_is_filtered_and_paged(many: ServedJobs) -> None:
    reported = many.ask("/api/v1/jobs?first=2&count=3").json
    assert (len(reported["jobs"]), reported["num_found"]) == (3, 11)
    failed = many.ask("/api/v1/jobs?text=FAILED&order=name").json
    assert [row["name"] for row in failed["jobs"]] == ["more-1", "more-3", "more-5", "more-7"]
    many.ask("/api/v1/jobs?order=size").assert_refused(400, "order")
    many.ask("/api/v1/jobs?count=501").assert_refused(400, "count")


def test_session_is_required_and_valid_for_all_jobs(runs: Path) -> None:
    with served_jobs(runs, CLOSED) as served:
        for path in ("/api/v1/jobs", "/api/v1/compare?jobs=a,b", "/jobs/a/api/v1/job", "/jobs/unknown/api/v1/job"):
            served.ask(path).assert_refused(401)
        assert served.dashboard.open_jobs.names == (), "no job is opened for an unknown caller"
        # The page of a job logs in at its own address.
        body = json.dumps({"token": OPERATOR_TOKEN}).encode()
        entered = served.ask("/jobs/a/api/v1/session", served.from_page(), method="POST", body=body)
        assert entered.json["role"] == "operator"
        cookie = session_headers(entered) | {"Sec-Fetch-Site": "same-origin"}
        reported = served.ask("/api/v1/jobs", cookie).json
        assert (reported["role"], reported["has_session"]) == ("operator", True)
        assert served.ask("/jobs/b/api/v1/job", cookie).json["role"] == "operator"
        assert served.ask("/api/v1/jobs", bearer(VIEWER_TOKEN)).json["role"] == "viewer"
        assert served.ask("/jobs/b/api/v1/job", bearer(VIEWER_TOKEN)).json["role"] == "viewer"


NAMES = (
    "..", ".", "..%2foutside", "%2e%2e", "led", "unknown", "a%00", "a%0a", "outside", "%2fetc", "etcd:a", "api",
)  # fmt: skip


def test_job_name_reaches_no_other_directory(many: ServedJobs) -> None:
    before = many.dashboard.open_jobs.names
    for name in NAMES:
        reply = many.ask(f"/jobs/{name}/api/v1/job")
        reply.assert_refused(404, where=name)
        reply = many.ask(f"/api/v1/compare?jobs=a,{name}")
        reply.assert_refused(404, "no such job", where=name)
    assert many.dashboard.open_jobs.names == before


def test_a_run_that_became_a_link_is_not_opened(runs: Path) -> None:
    write_run(runs.parent / "outside")
    with served_jobs(runs, period_s=60.0) as served:
        (runs / "b").rename(runs.parent / "was-b")
        (runs / "b").symlink_to(runs.parent / "outside")
        served.ask("/jobs/b/api/v1/job").assert_refused(404, "has become a symbolic link")


@pytest.mark.slow
def test_open_jobs_are_few_and_idle_ones_are_closed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_jobs_module, "_SWEEP_S", 0.02)
    write_run(runs / "c")
    with served_jobs(runs) as served:
        opened = served.dashboard.open_jobs
        opened.most = 2
        for name in ("a", "b", "c"):
            assert served.ask(f"/jobs/{name}/api/v1/job").status == 200
        assert opened.names == ("b", "c"), "the least recently used one was closed"
        listening = [served.connected() for _ in range(2)]
        try:
            for client, name in zip(listening, "bc", strict=True):
                client.sendall(head_of("GET", f"/jobs/{name}/api/v1/live", {}, served.port))
                read_head(client)
            served.ask("/jobs/a/api/v1/job").assert_refused(503, "2 jobs are open already")
            opened.idle_s = 0.0
            assert opened.names == ("b", "c"), "an open stream keeps a job open"
        finally:
            for client in listening:
                client.close()
        wait_until(lambda: opened.names == (), "jobs without viewers are closed")
        assert served.ask("/jobs/a/api/v1/job").status == 200


def assert_ends(stream: socket.socket) -> None:
    """Read a chunked response to its last chunk."""
    stream.settimeout(DEADLINE_S)
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        part = stream.recv(65536)
        assert part, "the connection ended before its response"
        received += part


def test_stream_of_a_job_ends_with_its_state_or_the_server(runs: Path) -> None:
    """The page connects again, and is then served from the job as it is now."""
    with ExitStack() as closing:
        with served_jobs(runs) as served:
            streams = [closing.enter_context(served.connected()) for _ in range(2)]
            for stream, name in zip(streams, "ab", strict=True):
                stream.sendall(head_of("GET", f"/jobs/{name}/api/v1/live", {}, served.port))
                read_head(stream)
            (runs / "a" / "coordination" / "exit-code").write_text("1\n")
            wait_until(lambda: served.ask("/jobs/a/api/v1/overview").json["state"] == "failed", "the state of a job")
            assert_ends(streams[0])
        assert_ends(streams[1])


def test_internal_error_in_a_job_shows_no_details(many: ServedJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert many.ask("/jobs/a/api/v1/job").status == 200

    def broken(_: object) -> object:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("megatrain_dashboard.api.job.job_parts", broken)
    response = many.ask("/jobs/a/api/v1/job")
    response.assert_refused(500, "internal error")
    assert b"secret" not in response.body


WRONG_LINES = {
    "--runs {runs} --replay a": (ExitCode.USAGE, "leave one of them out"),
    "a --runs {runs}": (ExitCode.USAGE, "leave one of them out"),
    "--runs {runs}/a/config.toml": (ExitCode.NOT_FOUND, "no such directory of runs"),
    "--runs {runs} --run {runs}/a": (ExitCode.USAGE, "the directory of one job"),
    "--runs {runs} --etcd-user u": (ExitCode.USAGE, "belong to the etcd of --rdzv-endpoint"),
    "--runs {runs} --enable-actions": (ExitCode.CONFIG, "name a token file with dashboard.operator_token_file"),
}


def test_contradictory_command_lines_are_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], stop_signals: None
) -> None:
    for line, (code, text) in WRONG_LINES.items():
        assert main(["dashboard", *line.format(runs=runs).split()]) == code, line
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_the_program_of_all_jobs(runs: Path) -> None:
    command = [sys.executable, "-m", "megatrain", "dashboard", "--runs", str(runs), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as program:
        try:
            assert program.stderr is not None
            line = program.stderr.readline()
            found = re.search(r"dashboard of 2 jobs at http://127\.0\.0\.1:(\d+)/jobs", line)
            assert found is not None, line
            reported = PageClient(int(found[1])).ask("/jobs/a/api/v1/overview").json
            assert (reported["state"], reported["step"]) == ("finished", 60)
            program.terminate()
            assert program.wait(DEADLINE_S) == 0
        finally:
            program.kill()


@contextmanager
def own_etcd(servers: EtcdServers, run: RunDirectory, job: str) -> Iterator[None]:
    """Hold the lock of a run's launch, with its own etcd."""
    place = run.root / "coordination" / "endpoint"
    place.write_text(json.dumps({"endpoints": servers.urls, "job": job}))
    place.chmod(0o600)
    with held(run):
        yield


@pytest.mark.slow
def test_a_job_that_runs_is_read_from_its_own_etcd_until_it_ends(runs: Path, tmp_path: Path) -> None:
    run = write_run(runs / "c", exit_code=None)
    (tmp_path / "etcd").mkdir()
    with EtcdServers(tmp_path / "etcd") as servers, EtcdClient(EtcdSettings.of(servers.urls)) as client:
        fill(client, JobKeys("c"), record=make_record(job="c", run_directory=str(run.root), config={}))
        with served_jobs(runs) as served:

            def row() -> dict[str, Any]:
                return {one["name"]: one for one in served.ask("/api/v1/jobs").json["jobs"]}["c"]

            def is_recorded() -> bool:
                return bool(served.ask("/jobs/c/api/v1/job").json["is_recorded"])

            with own_etcd(servers, run, "c"):
                wait_until(lambda: row()["is_live"], "its etcd is asked")
                assert row()["state"] == "training"
                assert not is_recorded()
                (run.root / "coordination" / "exit-code").write_text("0\n")
            wait_until(is_recorded, "it is shown as its files show it")
            assert (row()["state"], row()["is_live"]) == ("finished", False)


def test_the_api_of_many_jobs_describes_itself(many: ServedJobs) -> None:
    reported = many.ask("/api/v1/openapi.json").json
    paths = {"/api/v1/jobs", "/api/v1/compare", "/api/v1/live", "/api/v1/session", "/healthz", "/readyz"}
    assert set(reported["paths"]) == paths
    page = ROOT / "docs" / "reference" / "openapi-jobs.json"
    again = f"write it again: python -m megatrain_dashboard.openapi --jobs --output {page}"
    assert json.loads(page.read_text(encoding="ascii")) == reported, again


def test_two_runs_side_by_side(runs: Path) -> None:
    with served_jobs(runs) as served:
        reported = served.ask("/api/v1/compare?jobs=a,b&points=30").json
        zoomed = served.ask("/api/v1/compare?jobs=b,a&first=31&last=50&points=100").json
        report_steps(RunDirectory(runs / "b"), range(41, 51), loss=1.0, step_s=1.0, began_s=BEGAN_S + 40.0)
        wait_until(lambda: served.ask("/api/v1/compare?jobs=a,b").json["common_step"] == 50, "new steps")
    a, b = reported["runs"]
    assert (reported["stride"], reported["step"][:2], reported["step"][-1]) == (2, [2, 4], 60)
    assert reported["common_step"] == 40
    losses = [2.0 + 8.0 / step**0.5 for step in range(21, 41)]
    assert a["common_loss"] == pytest.approx((losses[9] + losses[10]) / 2)
    assert b["common_loss"] == pytest.approx((losses[9] + losses[10]) / 2 - 1.0)
    assert [(one["median_step_s"], one["median_tokens_per_s"]) for one in (a, b)] == [(2.0, 2048.0), (1.0, 4096.0)]
    assert [one["median_mfu"] for one in (a, b)] == pytest.approx([0.4, 0.8])
    assert [one["num_incidents"] for one in (a, b)] == [1, 0]
    assert a["loss"][0] == pytest.approx(2.0 + (8.0 + 8.0 / 2**0.5) / 2)
    assert b["loss"][20:] == [None] * 10, "it has no such steps"
    differing = {one["key"]: one["values"] for one in reported["differences"]}
    assert differing == {"job.name": ['"a"', '"b"'], "optimizer.lr": [differing["optimizer.lr"][0], "0.5"]}
    assert reported["num_same"] > 100
    assert (zoomed["step"][0], zoomed["step"][-1], zoomed["stride"]) == (31, 50, 1)
    assert [one["name"] for one in zoomed["runs"]] == ["b", "a"]
    assert zoomed["runs"][0]["loss"][10:] == [None] * 10


REFUSED = {
    "": (400, "jobs is missing"),
    "?jobs=a": (400, "expected 2 to 4 names"),
    "?jobs=a,a": (400, "expected 2 to 4 names"),
    "?jobs=a,b,c,d,e": (400, "expected 2 to 4 names"),
    "?jobs=a,unknown": (404, "no such job"),
    "?jobs=a,b&first=9&last=3": (400, "last=3"),
    "?jobs=a,b&more=1": (400, "no such parameter"),
}


def test_incomparable_runs_are_refused(many: ServedJobs) -> None:
    for query, (status, text) in REFUSED.items():
        many.ask(f"/api/v1/compare{query}").assert_refused(status, text, where=query)


def test_differences_are_of_configurations_that_are_known() -> None:
    found, num_same = differences([{"a": "1", "b": "2"}, None, {"a": "1", "b": "3", "c": "4"}])
    assert [(one.key, one.values) for one in found] == [("b", ("2", None, "3")), ("c", (None, None, "4"))]
    assert num_same == 1
    assert differences([{"a": "1"}, None]) == ((), 0)
