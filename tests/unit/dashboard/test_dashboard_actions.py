"""Actions through the page: who may request them, on what, and how often; each is executed once, and audited before."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import RequestKind
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Cordon, JobEnd
from megatrain.run_files.action_log import ACTIONS_NAME, INTENT, RESULT, ActionLog, read_actions
from megatrain_dashboard.actions.backend import EtcdBackend
from megatrain_dashboard.actions.checks import effect_of
from megatrain_dashboard.actions.handler import ActionHandler
from megatrain_dashboard.responses.errors import RefusalError
from megatrain_dashboard.settings import DashboardSettings
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from tests.helpers.action_harness import ADA, BOB, VERDICT, WAITING, ActionHarness, request_of
from tests.helpers.answering_driver import AnsweringDriver, answer
from tests.helpers.dashboard_server import OPERATOR_TOKEN, bearer, served
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.launched_job import NOW_S, make_cordon, make_host, make_record, make_round, make_snapshot
from tests.helpers.waiting import DEADLINE_S


@pytest.fixture
def harness(tmp_path: Path) -> ActionHarness:
    return ActionHarness(tmp_path / "diagnosis" / ACTIONS_NAME)


def test_action_is_audited_before_and_after_it(harness: ActionHarness) -> None:
    harness.backend.before = lambda: stages.append([entry.stage for entry in read_actions(harness.path).entries])
    stages: list[list[str]] = []
    reported = harness.take("evict", "host-2")
    expected = (True, False, "being done", False)
    assert (reported.is_accepted, reported.is_done, reported.text, reported.is_dry_run) == expected
    assert stages == [[INTENT]]
    assert [(asked.kind, asked.target, by) for asked, by in harness.backend.done] == [
        ("evict", "host-2", "ada via dashboard")
    ]
    trail = read_actions(harness.path)
    assert trail.problem == ""
    first, last = trail.entries
    assert (first.stage, last.stage) == (INTENT, RESULT)
    assert (first.is_accepted, first.is_done, first.text) == (False, False, "")
    audited = ("ada", "operator", "10.0.0.7", "evict", "host-2")
    assert (last.user, last.role, last.address, last.kind, last.target) == audited
    assert (last.reason, last.text, last.is_accepted) == ("before maintenance", "being done", True)
    assert first.action_id == last.action_id == reported.action_id
    assert last.prev_hash == first.entry_hash != ""


def test_a_dry_run_changes_nothing(harness: ActionHarness) -> None:
    reported = harness.take("evict", "host-2", is_dry_run=True)
    assert reported.is_dry_run
    assert "a new round would begin without it: 1 spare could take its place" in reported.text
    assert not harness.backend.done
    assert not harness.path.exists()


TARGETS = {"approve": "v-1", "dismiss": "v-1", "uncordon": "host-3", "cordon": "host-2", "evict": "host-2"}


def test_each_kind_of_action_describes_its_effect() -> None:
    snapshot = make_snapshot(cordons={"host-3": make_cordon(3)}, waiting=((WAITING, VERDICT),))
    for kind in (*TARGETS, "checkpoint", "restart", "stop", "diag-on", "diag-off"):
        text = effect_of(request_of(kind, TARGETS.get(kind, "")), snapshot)
        assert len(text) > 20, kind
        assert TARGETS.get(kind, "") in text, kind


UNFIT: list[tuple[tuple[str, ...], dict[str, Any], int, str]] = [
    (("checkpoint",), {"confirmation": "dem"}, 400, "type the job's name"),
    (("checkpoint",), {"confirmation": "Demo"}, 400, "type the job's name"),
    (("checkpoint", "host-1"), {}, 400, "leave it empty"),
    (("evict",), {}, 400, "name the host or verdict"),
    (("evict", "host-3"), {}, 404, "hosts that are in the round: host-1 and host-2"),
    (("evict", "host-9"), {}, 404, "no host 'host-9'"),
    (("cordon", "../../etc"), {}, 404, "registered"),
    (("uncordon", "host-1"), {}, 404, "hosts that are cordoned: none"),
    (("approve", "v-9"), {}, 404, "no verdict 'v-9' waits"),
    (("restart",), {"reason": "so\x1b[2Jwhat"}, 400, "control characters"),
    (("restart",), {"reason": "so \x9b2J what"}, 400, "control characters"),
    (("restart",), {"reason": "so \u202e what"}, 400, "control characters"),
    (("restart",), {"reason": "so\u2028what"}, 400, "control characters"),
    (("restart",), {"reason": "    "}, 400, "give a reason"),
    (("restart",), {"reason": "\u200b\u200b\u200b"}, 400, "give a reason"),
]
"""Kind and target, other fields, the status and the reason of the refusal."""


def test_action_that_does_not_fit_the_job_is_refused(harness: ActionHarness) -> None:
    for arguments, changed, status, text in UNFIT:
        for is_dry_run in (True, False):
            refusal = harness.refused(*arguments, is_dry_run=is_dry_run, **changed)
            assert (refusal.status, text in refusal.text) == (status, True), (arguments, refusal.text)
    assert not harness.backend.done
    assert not harness.path.exists()


def test_request_that_cannot_be_answered_is_not_sent(harness: ActionHarness) -> None:
    over = JobEnd(0, "trained", "host-1", NOW_S)
    for changed in ({"driver": ""}, {"hosts": {}, "rounds": {2: make_round()}}, {"end": over}):
        harness.backend.snapshot = make_snapshot(**changed)
        assert harness.refused("restart").status == 409, changed
    assert not harness.backend.done


def test_action_without_etcd_is_refused(harness: ActionHarness) -> None:
    harness.backend.problem = "connection refused"
    refusal = harness.refused()
    assert (refusal.status, "connection refused" in refusal.text) == (503, True)
    harness.backend.problem = ""
    assert harness.take().is_accepted, "the same key is valid when etcd is available again"


def test_the_same_key_is_carried_out_once(harness: ActionHarness) -> None:
    first = harness.take("restart")
    assert harness.take("restart") == first
    assert len(harness.backend.done) == 1
    # A restarted server finds it in the audit.
    harness.handler = harness.opened()
    assert harness.take("restart") == first
    assert len(harness.backend.done) == 1
    for other in (request_of("stop"), request_of("restart", reason="another one")):
        with pytest.raises(RefusalError, match="another request") as refusal:
            harness.handler.take(other, ADA)
        assert refusal.value.status == 409
    assert harness.refused("restart", caller=BOB).status == 409
    assert len(harness.backend.done) == 1


def test_the_same_key_at_the_same_time_is_carried_out_once(harness: ActionHarness) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        begun.release()
        assert may_end.wait(DEADLINE_S)

    harness.backend.before = wait
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(harness.take, "restart") for _ in range(8)]
        assert begun.acquire(timeout=DEADLINE_S)
        may_end.set()
        answers = {future.result(DEADLINE_S) for future in futures}
    assert len(answers) == 1
    assert len(harness.backend.done) == 1
    assert len(read_actions(harness.path).entries) == 2


def test_unfinished_action_is_not_repeated(harness: ActionHarness) -> None:
    harness.take("restart")
    lines = harness.path.read_bytes().splitlines(keepends=True)
    harness.path.write_bytes(lines[0])  # killed between the two
    harness.handler = harness.opened()
    refusal = harness.refused("restart")
    assert (refusal.status, "was begun" in refusal.text) == (409, True)
    assert len(harness.backend.done) == 1


def test_interrupting_actions_are_limited_to_four_an_hour(harness: ActionHarness) -> None:
    for number, kind in enumerate(("restart", "evict", "stop", "restart")):
        harness.now_s += 10
        harness.take(kind, "host-2" if kind == "evict" else "", f"key-0000000{number}")
    refusal = harness.refused("restart", key="key-one-more")
    assert (refusal.status, refusal.headers["Retry-After"]) == (429, "3571")
    assert "restart, evict and stop: at most 4 an hour" in refusal.text
    assert harness.refused("restart", key="key-one-more", is_dry_run=True).status == 429
    # other kinds are still accepted, and a restarted server counts the earlier ones
    assert harness.take("checkpoint", key="key-checkpoint").is_accepted
    harness.handler = harness.opened()
    assert harness.refused("stop", key="key-one-more").status == 429
    harness.now_s += 3571
    assert harness.take("restart", key="key-one-more").is_accepted


def test_other_actions_are_limited_to_twenty_an_hour(harness: ActionHarness) -> None:
    for number in range(20):
        harness.take("checkpoint", key=f"key-{number:08d}")
    assert harness.refused("diag-off", key="key-one-more").status == 429
    assert harness.take("restart", key="key-restart").is_accepted


def test_at_most_a_quarter_of_the_hosts_is_removed_an_hour(harness: ActionHarness) -> None:
    hosts = {f"host-{number}": make_host(number) for number in range(1, 9)}
    harness.backend.snapshot = make_snapshot(hosts=hosts)
    harness.take("cordon", "host-7", "key-00000007")
    harness.take("cordon", "host-8", "key-00000008")
    refusal = harness.refused("evict", "host-2", "key-00000002")
    assert (refusal.status, "2 of 8 hosts were removed" in refusal.text) == (429, True), refusal.text
    assert harness.refused("cordon", "host-6", "key-00000006").status == 429
    # An already removed host does not count again.
    assert harness.take("cordon", "host-7", "key-00000009").is_accepted
    harness.now_s += 3600
    assert harness.take("evict", "host-2", "key-00000002").is_accepted


def test_a_small_job_evicts_one_host_an_hour_at_most(harness: ActionHarness) -> None:
    harness.take("evict", "host-2", "key-00000002")
    assert harness.refused("evict", "host-1", "key-00000001").status == 429


def test_action_that_cannot_be_audited_is_not_carried_out(
    harness: ActionHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        refusal = harness.refused("restart")
    assert (refusal.status, "nothing was done" in refusal.text, "No space" in refusal.text) == (503, True, True)
    assert not harness.backend.done
    harness.backend.before = lambda: monkeypatch.setattr(os, "fsync", full)
    reported = harness.take("restart", key="key-00000002")
    assert "the audit could not be written" in reported.text
    assert reported.is_accepted, "it was executed, and the page must show that"


def test_actions_over_http(tmp_path: Path) -> None:
    harness = ActionHarness(tmp_path / ACTIONS_NAME)
    settings = DashboardSettings(port=0, operator_token=OPERATOR_TOKEN, enable_actions=True)
    headers = bearer(OPERATOR_TOKEN) | {"Content-Type": "application/json"}
    with served(tmp_path, settings, harness.handler) as server:
        body = request_of("restart").model_dump_json().encode()
        reply = server.ask("/api/v1/actions", headers, method="POST", body=body)
        assert (reply.status, reply.json["is_accepted"], reply.json["text"]) == (200, True, "being done")
        reply.assert_secured()
        assert harness.backend.done[0][1] == "token-operator via dashboard"
        unknown = json.dumps({**json.loads(body), "is_forced": True}).encode()
        server.ask("/api/v1/actions", headers, method="POST", body=unknown).assert_refused(400, "is_forced")
        for bad in ({"kind": "format"}, {"reason": "x"}, {"idempotency_key": "a b c d e f"}, {"reason": "x" * 501}):
            wrong = json.dumps({**json.loads(body), **bad}).encode()
            server.ask("/api/v1/actions", headers, method="POST", body=wrong).assert_refused(400, next(iter(bad)))
    assert len(harness.backend.done) == 1


@pytest.fixture
def client(etcd: EtcdServers) -> Iterator[EtcdClient]:
    with EtcdClient(EtcdSettings.of(etcd.urls)) as one:
        yield one
        one.delete(KeyRange.prefix(JobKeys("demo").prefix))


def fill(client: EtcdClient, keys: JobKeys) -> None:
    client.put(keys.record, encode(make_record()))
    for number in (1, 2, 3):
        client.put(keys.host(f"host-{number}"), encode(make_host(number)))
    client.put(keys.round(2), encode(make_round()))


def test_driver_gets_the_request_of_the_command_line(client: EtcdClient, tmp_path: Path) -> None:
    keys = JobKeys("demo")
    fill(client, keys)
    handler = ActionHandler(EtcdBackend(client, keys), ActionLog(tmp_path / ACTIONS_NAME))
    with AnsweringDriver(client, keys, lambda asked: [answer(asked, "round 2 is over", is_done=False)]) as driver:
        reported = handler.take(request_of("evict", "host-2"), ADA)
    assert (reported.is_accepted, reported.is_done, reported.text) == (True, False, "round 2 is over")
    (asked,) = driver.requests
    assert (asked.kind, asked.host, asked.by) == (RequestKind.EVICT, "host-2", "ada via dashboard")
    assert asked.reason == "before maintenance"
    with AnsweringDriver(client, keys, lambda asked: [answer(asked, "not now", is_accepted=False)]):
        reported = handler.take(request_of("restart", key="key-00000002"), ADA)
    assert (reported.is_accepted, reported.text) == (False, "not now")


def test_request_that_no_driver_accepts_is_withdrawn(client: EtcdClient, tmp_path: Path) -> None:
    keys = JobKeys("demo")
    fill(client, keys)
    handler = ActionHandler(EtcdBackend(client, keys, accept_s=0.3), ActionLog(tmp_path / ACTIONS_NAME))
    with AnsweringDriver(client, keys, lambda asked: []):
        reported = handler.take(request_of("restart"), ADA)
    assert (reported.is_accepted, reported.is_done) == (False, True)
    assert "no driver accepted it; the request is withdrawn" in reported.text
    assert client.get(keys.directory("requests")) is None


def test_cordons_and_recording_equal_those_of_the_command_line(client: EtcdClient, tmp_path: Path) -> None:
    keys = JobKeys("demo")
    fill(client, keys)
    handler = ActionHandler(EtcdBackend(client, keys), ActionLog(tmp_path / ACTIONS_NAME))
    assert handler.take(request_of("cordon", "host-3", "key-00000001"), ADA).is_done
    item = client.get(keys.cordon("host-3"))
    assert item is not None
    cordon = decode(Cordon, item.value, "cordon")
    assert (cordon.by, cordon.reason) == ("ada via dashboard", "before maintenance")
    with pytest.raises(RefusalError, match="cordoned already, by ada via dashboard"):
        handler.take(request_of("cordon", "host-3", "key-00000002"), ADA)
    assert "no longer cordoned" in handler.take(request_of("uncordon", "host-3", "key-00000003"), ADA).text
    assert client.get(keys.cordon("host-3")) is None
    for kind, is_on in (("diag-off", False), ("diag-on", True)):
        assert handler.take(request_of(kind, key=f"key-{kind}"), ADA).is_accepted
        reported = client.get(keys.diag_settings)
        assert reported is not None
        settings = decode(DiagSettings, reported.value, "settings")
        assert (settings.is_on, settings.by, settings.reason) == (is_on, "ada via dashboard", "before maintenance")
