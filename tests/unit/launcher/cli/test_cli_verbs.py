"""`megatrain status`, `host`, `job` and `incidents` against a real etcd that is filled with records."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.incident import IncidentState
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Cordon, JobEnd
from megatrain_job.commands.job_location import add_job, list_jobs, opened_job
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange, Range
from megatrain_job.jobs import send_request
from megatrain_job.jobs.send_request import make_request, request_events
from megatrain_job.jobs.snapshot import read_job
from megatrain_launcher.commands.status import StatusCode
from megatrain_launcher.commands.wait_for_answer import wait_for_answer
from tests.helpers.answering_driver import AnsweringDriver, Record, answer
from tests.helpers.etcd_server import EtcdServers, enable_users, post
from tests.helpers.launched_job import make_cordon, make_failure, make_incident, make_snapshot
from tests.helpers.ports import free_ports
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S, wait_until
from tests.helpers.written_job import fill, make_driver
from tests.unit.launcher.cli.conftest import Run


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """A separate etcd, because a test fills it here."""
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


def test_an_earlier_launch_is_distinguished(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    fill(client, keys)
    record = make_snapshot().record
    assert record is not None
    client.put(keys.record, encode(record))  # launched again: these records are of the previous launch
    found = read_job(client, keys)
    assert (found.newest_round, found.incidents, len(found.earlier_incidents)) == (None, (), 1)
    assert megatrain("status").startswith(f"{keys.job}: green, about to start: 3 hosts can be used")
    assert megatrain("incidents").startswith(f"{keys.job}: 1 incident: 1 recovered")


def test_an_etcd_out_of_space_is_reported(client: EtcdClient, keys: JobKeys, etcd: EtcdServers, megatrain: Run) -> None:
    fill(client, keys)
    member = post(etcd.urls[0], "/v3/maintenance/status", {})["header"]["member_id"]
    alarm = {"memberID": member, "alarm": "NOSPACE"}
    post(etcd.urls[0], "/v3/maintenance/alarm", {"action": "ACTIVATE", **alarm})
    try:
        text = megatrain("status", code=StatusCode.RED)
        assert text.startswith(f"{keys.job}: red, training: ")
        assert "!! etcd-alarm: etcd raises NOSPACE: the driver can store no decision until the alarm is cleared" in text
    finally:
        post(etcd.urls[0], "/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
    assert megatrain("status", "--json")["health"] == {"level": "green", "reasons": []}


def test_unreadable_records_are_reported_by_status(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    fill(client, keys)
    client.put(keys.host("host-8"), b"\x1b[2Jnonsense")
    client.put(keys.incident("0"), b'{"schema_version": 7}')
    make_driver(client, keys, "host-2")

    found = megatrain("status", "--json", code=StatusCode.AMBER)
    assert (found["state"], found["health"]["level"], found["driver"]) == ("training", "amber", "host-2")
    assert [one["code"] for one in found["health"]["reasons"]] == ["record-unreadable"] * 2
    assert "hosts/host-8" in megatrain("status", code=StatusCode.AMBER)


def test_status_finds_its_job_by_directory_name_or_endpoint(
    client: EtcdClient, keys: JobKeys, etcd: EtcdServers, megatrain: Run
) -> None:
    fill(client, keys)
    by_endpoint = ("--rdzv_endpoint", etcd.urls[0].removeprefix("http://"))
    for arguments in ((), ("demo",), ("runs/demo",), by_endpoint):
        text = megatrain("status", *arguments)  # the only job in this etcd
        expected = f"{keys.job}: green, training: step 1,240, 80 ms a step, 4 ranks on 2"
        assert text.startswith(expected), arguments
    assert list_jobs(client) == (keys.job,)
    assert megatrain("status", "--json")["hosts"][1]["status"]["max_step"] == 1240


def test_jobs_are_distinguished(client: EtcdClient, keys: JobKeys, etcd: EtcdServers, megatrain: Run) -> None:
    others = [JobKeys(f"{keys.job}{end}") for end in ("-x", "0")]  # one before and one after it in the order of keys
    for other in (keys, *others):
        fill(client, other)
    torchrun = JobKeys("rdzv-abc")
    client.put(torchrun.host("h"), b"{}")
    try:
        assert set(list_jobs(client)) == {keys.job, *(other.job for other in others)}
        megatrain("status", "--rdzv-endpoint", etcd.urls[0], code=2)
        assert re.search(rf"no job is named, and etcd at http.* has {keys.job}, .* and .*; name one", megatrain.notes)
        for other in others:
            assert megatrain("status", other.job, "--rdzv-endpoint", etcd.urls[0]).startswith(f"{other.job}: ")
    finally:
        for other in (*others, torchrun):
            client.delete(KeyRange.prefix(other.prefix))


def test_missing_subcommand_is_a_usage_error(megatrain: Run) -> None:
    for verb in ("host", "job"):
        megatrain(verb, code=2)
        assert "the following arguments are required: SUBCOMMAND" in megatrain.notes


def test_job_that_is_not_found_is_named(keys: JobKeys, etcd: EtcdServers, megatrain: Run, run: Path) -> None:
    megatrain("status", "unknown", code=72)
    assert "job 'unknown': no run directory of that name" in megatrain.notes
    megatrain("status", "runs/demo/coordination", code=StatusCode.NEVER_STARTED)
    megatrain("status", "a/b", "--rdzv-endpoint", etcd.urls[0], code=72)
    megatrain("status", "runs/demo", code=StatusCode.UNREACHABLE)
    assert f"job '{keys.job}': etcd has no job of this name" in megatrain.notes
    megatrain("status", "--rdzv-endpoint", etcd.urls[0], code=72)
    assert "has no job; start one with `megatrain launch`" in megatrain.notes

    (run / "coordination" / "exit-code").write_text("75\n")
    endpoint = (run / "coordination" / "endpoint").rename(run / "away")
    reported = megatrain("status", "runs/demo", code=StatusCode.ENDED)
    assert reported.startswith("runs/demo: ended: it was saved and stopped; launch it again to continue (exit code 75)")
    megatrain("host", "ls", "runs/demo", code=72)
    assert (
        "runs/demo: its last job ended with exit code 75; `megatrain dashboard --replay runs/demo` shows"
        in megatrain.notes
    )
    endpoint.rename(run / "coordination" / "endpoint")
    (run.parent / "other" / "coordination").mkdir(parents=True)
    (run.parent / "other" / "coordination" / "endpoint").write_text('{"endpoints": []}')
    megatrain("status", code=2)
    assert "there are runs/demo and runs/other; name one" in megatrain.notes
    megatrain("status", "other", code=StatusCode.UNREACHABLE)
    assert 'other/coordination/endpoint: expected {"endpoints"' in megatrain.notes


@pytest.mark.slow
def test_incidents_of_a_run_are_shown_without_etcd(megatrain: Run, run: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    (run / "coordination" / "endpoint").write_text(json.dumps({"endpoints": [url], "job": "demo"}))
    (run / "incidents").mkdir()
    (run / "incidents" / "1.json").write_bytes(encode(make_incident("0001")))
    (run / "incidents" / "2.json").write_bytes(encode(make_incident("0002", state=IncidentState.STOPPED)))
    (run / "incidents" / "3.json").write_bytes(b"torn")

    done = in_a_process("status", "demo", at=run.parent.parent)
    # one note, and no line of the client's log
    assert done.stderr.startswith("megatrain: the job of runs/demo is not running, or its etcd is out of reach: ")
    assert (done.returncode, done.stderr.count("\n")) == (StatusCode.UNREACHABLE, 1)
    assert "runs/demo: unreachable: it was launched with an etcd elsewhere" in done.stdout
    (run / "coordination" / "endpoint").unlink()
    found = megatrain("incidents", "runs/demo", "--json")
    assert [one["incident_id"] for one in found["incidents"]] == ["20270115-0002", "20270115-0001"]
    assert "incidents/3.json: not JSON" in megatrain.notes
    assert "the job cannot be read from etcd; the incidents shown are from runs/demo/incidents" in megatrain.notes
    assert megatrain("incidents", "demo", "--id", "last").startswith("20270115-0002 stopped: ")


def test_incidents_are_listed_and_shown_by_id(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    fill(
        client,
        keys,
        incidents=(make_incident("0001"), make_incident("0002", failures=(make_failure(line="\x1b[31m"),))),
    )
    assert megatrain("incidents").startswith(f"{keys.job}: 2 incidents: 2 recovered; training time 99.1%")
    story = megatrain("incidents", "--id", "20270115-0002")
    assert "\\x1b[31m" in story
    assert re.search(r"(?m)^  rendezvous +1\.50 +#+$", story)
    found = megatrain("incidents", "--id", "last", "--json")["incident"]
    assert (found["incident_id"], found["steps_lost"], found["phase_seconds"]["load"]) == (
        "20270115-0002", 4, pytest.approx(0.4, abs=1e-3),
    )  # fmt: skip
    megatrain("incidents", "--id", "2027", code=2)
    assert "the beginning of 2 incidents: 20270115-0002 and 20270115-0001" in megatrain.notes
    megatrain("incidents", "demo", "--id", "x", code=72)
    assert "has no incident 'x'" in megatrain.notes


def test_cordons_are_written_directly(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    megatrain("host", "cordon", "--host", "host-9", "--reason", "ECC")  # No process runs yet.
    assert f"etcd has no job '{keys.job}' yet" in megatrain.notes
    fill(client, keys)
    assert "host-2 is cordoned" in megatrain("host", "cordon", "--host", "host-2")
    assert "host-2 stays in round 2 until that round is over; `megatrain host evict --host host-2`" in megatrain.notes
    item = client.get(keys.cordon("host-2"))
    assert item is not None
    assert re.fullmatch(r".+@.+", decode(Cordon, item.value, "").by)

    again = megatrain("host", "cordon", "--host", "host-9", "--reason", "other", "--json")
    assert (again["is_new"], again["cordon"]["reason"]) == (False, "ECC")
    assert "no host host-9 is registered; there are host-1, host-2 and host-3" in megatrain.notes
    listed = {one["host"]: one["state"] for one in megatrain("host", "ls", "demo", "--json")["hosts"]}
    assert listed == {"host-1": "running", "host-2": "running", "host-3": "spare", "host-9": "gone"}
    assert "cordoned by" in megatrain("host", "ls")

    assert megatrain("host", "uncordon", "--host", "host-9", "--json")["was_cordoned"] is True
    assert "was not cordoned" in megatrain("host", "uncordon", "--host", "host-9")
    megatrain("host", "cordon", "--host", "a/b", code=2)


def test_request_prints_both_answers_of_the_driver(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    def reply(request: JobRequest) -> list[Record]:
        return [answer(request, "taken up", is_done=False), answer(request, f"{request.kind} at step 1,250")]

    kinds = (RequestKind.CHECKPOINT, RequestKind.RESTART, RequestKind.STOP)
    fill(client, keys, has_driver=False)
    with AnsweringDriver(client, keys, reply) as driver:
        for kind in kinds:
            assert megatrain("job", kind, "demo", "--reason", "because") == f"{keys.job}: {kind} at step 1,250\n"
            assert "megatrain: taken up" in megatrain.notes, kind
    assert [(request.kind, request.reason) for request in driver.requests] == [(kind, "because") for kind in kinds]
    assert not client.read(Range(KeyRange.prefix(keys.directory("requests")))).items


def test_an_accepted_request_stands_without_its_asker(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    fill(client, keys, has_driver=False)
    with AnsweringDriver(client, keys, lambda request: [answer(request, "taken up", is_done=False)]) as driver:
        first = megatrain("job", "checkpoint", "--no-wait", "--json")
        assert (first["is_done"], first["text"]) == (False, "taken up")
        megatrain("job", "restart", "--timeout", "0.3", code=68)
        assert "restart was requested 300 ms ago and accepted, but is not done yet" in megatrain.notes
    left = client.read(Range(KeyRange.prefix(keys.directory("requests")))).items
    assert [(item.key.decode(), item.lease_id) for item in left] == [
        (keys.request(request.request_id), 0) for request in driver.requests
    ]


def test_refused_eviction_is_an_error_with_its_reason(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    fill(client, keys, has_driver=False)

    def reply(request: JobRequest) -> list[Record]:
        return [answer(request, f"no spare could take the place of {request.host}", is_accepted=False)]

    with AnsweringDriver(client, keys, reply) as driver:
        megatrain("host", "evict", "--host", "host-2", code=76)
        assert "the driver refused: no spare could take the place of host-2" in megatrain.notes
        megatrain("host", "evict", "--host", "host-7", code=72)
        assert "has no host 'host-7'; there are host-1, host-2 and host-3" in megatrain.notes
    assert len(driver.requests) == 1


def test_request_without_a_driver_is_an_error(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    megatrain("job", "stop", code=72)
    assert "etcd has no job of this name" in megatrain.notes
    fill(client, keys, has_driver=False)
    megatrain("job", "restart", code=68)
    assert "has no driver at the moment, so a request would not be answered" in megatrain.notes
    fill(client, keys, end=JobEnd(66, "no checkpoint", 1.0))
    megatrain("job", "restart", code=68)
    assert "is over (exit code 66): no checkpoint" in megatrain.notes


def test_unanswered_request_is_withdrawn(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    fill(client, keys)
    megatrain("job", "restart", "--timeout", "0.3", code=68)
    assert "no driver accepted it; the request is withdrawn" in megatrain.notes
    assert not client.read(Range(KeyRange.prefix(keys.directory("requests")))).items


def test_the_end_of_the_job_answers_a_stop(client: EtcdClient, keys: JobKeys, megatrain: Run) -> None:
    fill(client, keys, has_driver=False)

    def reply(request: JobRequest) -> list[Record]:
        return [answer(request, "saving", is_done=False), JobEnd(75, "saved at step 1,260", time.time())]

    with AnsweringDriver(client, keys, reply):
        assert "the job has ended with exit code 75: saved at step 1,260" in megatrain("job", "stop")


@contextmanager
def etcd_until(directory: Path, happened: Callable[[EtcdClient], None]) -> Iterator[EtcdClient]:
    """Yield a client of an etcd that is killed as soon as `happened` returns, which gets another client."""
    with (
        EtcdServers(directory) as servers,
        EtcdClient(EtcdSettings.of(servers.urls, call_s=3.0)) as client,
        EtcdClient(EtcdSettings.of(servers.urls)) as other,
    ):

        def end_etcd() -> None:
            happened(other)
            servers.members[0].kill()

        thread = threading.Thread(target=end_etcd, name="end of etcd")
        thread.start()
        yield client
        thread.join()


@pytest.mark.slow
def test_an_etcd_that_ends_with_its_job_answers_a_stop(tmp_path: Path) -> None:
    keys, request = JobKeys("demo"), make_request(RequestKind.STOP)
    with etcd_until(tmp_path, lambda other: _accept(other, keys, request)) as client:
        last = wait_for_answer(client, keys, request, timeout_s=DEADLINE_S, unreachable_s=0.2)
    assert last.is_done
    assert last.text == "saving; since then the job's etcd does not answer, as after the end of a job"


@pytest.mark.slow
def test_unanswered_request_outlives_an_outage_of_etcd(tmp_path: Path) -> None:
    """While etcd does not answer, the request cannot be withdrawn, and the error must not state that it is."""
    keys, request = JobKeys("demo"), make_request(RequestKind.STOP)

    def await_request(other: EtcdClient) -> None:
        wait_until(lambda: other.get(keys.request(request.request_id)) is not None, "the request")

    with (
        etcd_until(tmp_path, await_request) as client,
        pytest.raises(CoordinationError, match="the request is deleted when its lease ends; etcd: "),
    ):
        list(request_events(client, keys, request, timeout_s=DEADLINE_S, accept_s=DEADLINE_S / 30))


def test_accepted_request_may_take_longer(client: EtcdClient, keys: JobKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    request, ahead_s = make_request(RequestKind.CHECKPOINT), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(send_request, "time", clock)
    thread = threading.Thread(target=_accept, args=(client, keys, request), name="etcd accepting")
    thread.start()
    with closing(request_events(client, keys, request, timeout_s=3 * DEADLINE_S, accept_s=DEADLINE_S)) as news:
        next(news)
        ahead_s[0] = DEADLINE_S  # The time to accept is over.
        client.put(keys.answer(request.request_id), encode(answer(request, "saved")))
        last = next(news)
    thread.join()
    assert isinstance(last, Answer)
    assert (last.text, last.is_done) == ("saved", True)


def _accept(client: EtcdClient, keys: JobKeys, request: JobRequest) -> None:
    """Accept a request as a driver would, and wait until the requester has received the answer."""
    key = keys.request(request.request_id)
    wait_until(lambda: client.get(key) is not None, "the request")
    client.put(keys.answer(request.request_id), encode(answer(request, "saving", is_done=False)))
    wait_until(lambda: (item := client.get(key)) is not None and item.lease_id == 0, "the requester")


@pytest.mark.slow
def test_a_password_comes_from_a_file(tmp_path: Path, megatrain: Run) -> None:
    (tmp_path / "closed").mkdir()
    with EtcdServers(tmp_path / "closed") as servers:
        keys = JobKeys("demo")
        with EtcdClient(EtcdSettings.of(servers.urls)) as client:
            fill(client, keys)
        word = "a-word_of-32-characters-as-made-"
        enable_users(servers.urls[0], "root-word", {"ops": word}, keys.prefix)
        secret = tmp_path / "runs" / "demo" / "coordination" / "password"
        secret.write_text(f"{word}\n")
        secret.chmod(0o600)
        arguments = ("status", "demo", "--rdzv-endpoint", servers.urls[0], "--etcd-user", "ops")
        reported = {"endpoints": servers.urls, "job": "demo", "user": "ops"}
        (tmp_path / "runs" / "demo" / "coordination" / "endpoint").write_text(json.dumps(reported))
        assert "green, training" in megatrain("status")
        (tmp_path / "runs" / "demo" / "coordination" / "endpoint").unlink()
        assert "green, training" in megatrain(*arguments, "--etcd-password-file", secret)
        secret.write_text("wrong")
        megatrain(*arguments, "--etcd-password-file", secret, code=77)
        assert "wrong" not in megatrain.notes.replace("wrong user", "")


def in_a_process(*arguments: str, at: Path, script: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command line, or a script, as a separate program."""
    program = ["-c", script] if script else ["-m", "megatrain", *arguments]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    command = [sys.executable, *program]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=at, timeout=DEADLINE_S, check=False, env=environment
    )


def test_patient_command_has_longer_time_limits(run: Path) -> None:
    parser = argparse.ArgumentParser()
    add_job(parser)
    args = parser.parse_args(["demo"])
    with opened_job(args) as job, opened_job(args, is_patient=True) as patient:
        usual = EtcdSettings.of("x")
        assert job.client.settings.call_s < patient.client.settings.call_s == usual.call_s
        assert patient.client.settings.attempt_s == usual.attempt_s
        assert patient.client.settings.endpoints == job.client.settings.endpoints


def test_verbs_load_no_torch(client: EtcdClient, keys: JobKeys, run: Path) -> None:
    fill(client, keys)
    client.put(keys.cordon("host-3"), encode(make_cordon(3)))
    script = (
        "import sys\nfrom megatrain.cli import main\n"
        "codes = [main(arguments) for arguments in (['status'], ['host', 'ls'], ['incidents'], ['job', '--help'])]\n"
        "heavy = [name for name in ('torch', 'numpy') if name in sys.modules]\nprint(codes, heavy, file=sys.stderr)\n"
    )
    assert in_a_process(at=run.parent.parent, script=script).stderr.strip() == "[0, 0, 0, 0] []"
