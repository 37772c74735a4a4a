"""The topics of a job, from the snapshot that `megatrain status` reads, and `megatrain notify test`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.records.incident import OVER_NOTE, Incident, IncidentKind, IncidentState, Moments
from megatrain.contracts.records.rounds import JobEnd
from megatrain_job.jobs.health import Health, HealthLevel, Reason, ReasonCode
from megatrain_launcher.notify.job_topics import JUDGED_S, SETTLED_S, topics_of
from megatrain_launcher.notify.topics import Event, Stage, Topic
from tests.helpers.http_receiver import HttpReceiver, ReceiverReply
from tests.helpers.launched_job import NOW_S, make_incident, make_snapshot
from tests.helpers.notification_topics import SMALL, write_secret
from tests.helpers.source_tree import ROOT
from tests.helpers.vendor_rules import check_alertmanager, check_pagerduty

AMBER, RED, GREEN = HealthLevel.AMBER, HealthLevel.RED, HealthLevel.GREEN


def topics(*reasons: Reason, **changes: Any) -> dict[str, Topic]:
    found = topics_of(make_snapshot(**changes), Health(reasons), {reason.code: NOW_S for reason in reasons}, NOW_S)
    assert len({topic.name for topic in found}) == len(found)
    return {topic.name.partition("/")[0]: topic for topic in found}


def of_incident(**changes: Any) -> Topic:
    return topics(incidents=(make_incident(**changes),))["incident"]


def opened(**changes: Any) -> Incident:
    moments = Moments(NOW_S - 2.0, NOW_S - 1.9, NOW_S - 1.9)
    return make_incident(
        **{"state": IncidentState.OPEN, "moments": moments, "next_round": None, "resumed_step": None, **changes}
    )


def test_an_incident_has_rank_host_time_and_cost() -> None:
    topic = of_incident()
    assert (topic.stage, topic.level) == (Stage.CLOSED, AMBER)
    assert topic.where == "host-2 (rank 3)"
    assert (topic.step, topic.cost) == (1234, "3.2 s, 4 steps lost")
    assert topic.what == "a worker ended: rank 3 on host-2 was killed by SIGKILL (9)"
    assert topic.activity == "the job trains again since step 1,230"
    assert topic.action == "check host-2 when there is time"
    assert topic.ended_unix_s == make_incident().moments.first_step


def test_stage_and_level_of_an_incident() -> None:
    for changes, stage, level in [
        ({}, Stage.OPEN, AMBER),
        ({"next_round": 3}, Stage.UNDER_WAY, AMBER),
        ({"kind": IncidentKind.REQUEST}, Stage.OPEN, GREEN),
        ({"action": "requeue"}, Stage.OPEN, GREEN),
        ({"kind": IncidentKind.STRAGGLER, "action": "evict"}, Stage.OPEN, AMBER),
        ({"state": IncidentState.STOPPED, "action": "stop"}, Stage.CLOSED, AMBER),
        ({"state": IncidentState.HELD, "round": 2, "kind": IncidentKind.CONTROL_PLANE}, Stage.OPEN, AMBER),
        ({"state": IncidentState.HELD, "round": 1, "kind": IncidentKind.CONTROL_PLANE}, Stage.CLOSED, AMBER),
        ({"state": IncidentState.HELD, "round": 2, "notes": {OVER_NOTE: "1800000000.5"}}, Stage.CLOSED, AMBER),
        ({"state": IncidentState.RECOVERED}, Stage.CLOSED, AMBER),
    ]:
        topic = topics(incidents=(opened(**changes),))["incident"]
        assert (topic.stage, topic.level) == (stage, level), changes


def test_an_incident_that_is_not_judged_is_sent_a_moment_later() -> None:
    early = topics(incidents=(opened(),))["incident"]
    assert early.ready_unix_s == NOW_S - 1.9 + JUDGED_S
    judged = replace(opened().moments, halted=NOW_S - 1.0)
    assert topics(incidents=(opened(moments=judged),))["incident"].ready_unix_s == NOW_S - 1.9


def test_end_of_a_job_has_the_level_of_its_exit_code() -> None:
    for code, level, action in [
        (ExitCode.OK, GREEN, "no action is needed"),
        (ExitCode.SAVED_AND_STOPPED, GREEN, "no action is needed"),
        (ExitCode.FAILURE, RED, "fix the cause, then start the job again"),
        (-9, RED, "fix the cause, then start the job again"),
    ]:
        reason = Reason(ReasonCode.NO_DRIVER, "no driver is elected")
        found = topics(reason, end=JobEnd(int(code), "so it was decided", NOW_S, 2))
        assert set(found) == {"incident", "end"}, "the end reports everything"
        assert found["end"].level is level, code
        assert found["end"].action.startswith(action), code
        assert "so it was decided" in found["end"].what, code


def test_transient_reason_is_reported_when_it_lasts() -> None:
    for code, level, settles_s in [
        (ReasonCode.DISK_FILLING, AMBER, 0.0),
        (ReasonCode.SAVES_FAIL, RED, 0.0),
        (ReasonCode.FILES_REMOVED, RED, 0.0),
        (ReasonCode.DRIVER_ALARM, AMBER, SETTLED_S),
        (ReasonCode.DAEMON_SILENT, AMBER, SETTLED_S),
        (ReasonCode.HOST_LOST, RED, SETTLED_S),
    ]:
        reason = Reason(code, "something is wrong with host-1", hosts=("host-1",))
        found = topics(reason)["health"]
        assert (found.name, found.event, found.level) == (f"health/{code}", Event.HEALTH, level), code
        assert found.ready_unix_s == NOW_S + settles_s, code
        since = topics(replace(reason, since_unix_s=NOW_S - 100))["health"]
        # The start is by a host's clock, the duration by the reader's clock.
        assert (since.began_unix_s, since.ready_unix_s) == (NOW_S - 100, NOW_S + settles_s), code


def test_used_and_reached_restart_limit_are_one_topic() -> None:
    near = topics(Reason(ReasonCode.RESTART_BUDGET, "10 of 20 restarts are used"))["restarts"]
    reached = topics(Reason(ReasonCode.RESTART_LIMIT, "20 of 20 restarts are used"))["restarts"]
    assert (near.name, near.level, reached.name, reached.level) == ("restarts", AMBER, "restarts", RED)
    assert near.ready_unix_s == NOW_S
    assert near.event is Event.RESTARTS


def test_reason_with_its_own_topic_is_reported_once() -> None:
    codes = (ReasonCode.RECOVERING, ReasonCode.HELD, ReasonCode.VERDICT_WAITING, ReasonCode.FAILED)
    assert set(topics(*(Reason(code, "x") for code in codes))) == {"incident"}


def test_log_text_becomes_one_printable_line() -> None:
    topic = of_incident(reason="bad\x1b[31m\nline " + "x" * 2000)
    assert topic.what.isprintable()
    assert len(topic.what) <= 700


def test_runbook_of_every_topic_exists() -> None:
    books = ROOT / "docs" / "runbooks"
    kinds = [topics(incidents=(opened(kind=kind),))["incident"].runbook for kind in IncidentKind]
    health = [topics(Reason(code, "x")) for code in ReasonCode]
    others = [topic.runbook for found in health for topic in found.values()]
    for name in filter(None, [*kinds, *others, "verdict.md", "notifications.md"]):
        assert (books / name.partition("#")[0]).is_file(), name


KEY = "0123456789abcdef0123456789abcdef"


def write_config(directory: Path, receiver: HttpReceiver) -> Path:
    key = write_secret(directory / "key", KEY)
    path = directory / "config.toml"
    path.write_text(
        f'{SMALL}[pagerduty]\nrouting_key_file = "{key}"\nurl = "{receiver.url}/v2/enqueue"\n'
        f'[alertmanager]\nurl = "{receiver.url}"\n[webhook]\nurl = "{receiver.url}/hook"\n'
    )
    return path


def test_every_receiver_is_tried_and_its_test_alert_resolved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HttpReceiver() as receiver:
        assert main(["notify", "test", str(write_config(tmp_path, receiver))]) == 0
        triggered, resolved = receiver.documents[:2]
        fired, ended = receiver.documents[2:4]
    assert capsys.readouterr().out.splitlines() == [
        "pagerduty: 200 ok (and resolved again)", "alertmanager: 200 ok (and resolved again)", "webhook: 200 ok",
    ]  # fmt: skip
    for event in (triggered, resolved):
        check_pagerduty(event)
    assert [triggered["event_action"], resolved["event_action"]] == ["trigger", "resolve"]
    assert triggered["dedup_key"] == resolved["dedup_key"]
    for alerts in (fired, ended):
        check_alertmanager(alerts)
    assert fired[0]["labels"] == ended[0]["labels"]
    assert receiver.documents[4]["text"].count("this is a test message")


def test_failed_receiver_is_reported_and_the_others_are_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with HttpReceiver(ReceiverReply(403, body=f"no such key {KEY}".encode())) as receiver:
        assert main(["notify", "test", str(write_config(tmp_path, receiver))]) == 1
    out = capsys.readouterr().out
    assert "pagerduty: FAILED: http://127.0.0.1" in out
    assert "answers 403: no such key (secret)" in out
    assert KEY not in out
    assert "webhook: 200 ok" in out


def test_receiver_is_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with HttpReceiver() as receiver:
        path = write_config(tmp_path, receiver)
        assert main(["notify", "test", str(tmp_path), "--receiver", "webhook"]) == 0
        assert [one.path for one in receiver.posted] == ["/hook"]
        assert main(["notify", "test", str(path), "--receiver", "slack"]) == 78
    assert "configured receivers: pagerduty, alertmanager, webhook" in capsys.readouterr().err


def test_notify_without_receivers_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(SMALL)
    assert main(["notify", "test", str(tmp_path)]) == 78
    assert "no receiver is configured" in capsys.readouterr().err


def test_a_run_that_others_can_write_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its author could name our secrets, and an address to which they are sent."""
    with HttpReceiver() as receiver:
        path = write_config(tmp_path, receiver)
        path.chmod(0o666)
        assert main(["notify", "test", str(tmp_path)]) == 65
        path.chmod(0o644)
        tmp_path.chmod(0o777)
        assert main(["notify", "test", str(tmp_path)]) == 65
        tmp_path.chmod(0o755)
        kept = tmp_path / "kept.toml"
        path.rename(kept)
        path.symlink_to(kept)
        assert main(["notify", "test", str(tmp_path)]) == 65
        assert receiver.posted == []
    assert capsys.readouterr().err.count("other users may have written it") >= 2
