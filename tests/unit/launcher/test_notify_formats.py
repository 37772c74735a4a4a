"""Messages in the documented formats of the receivers; alerts are repeated while they last."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from email import policy
from functools import partial
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.programs.processes import install_parent_death_guard
from megatrain_job.jobs.health import HealthLevel
from megatrain_launcher.notify.formats import (
    TEMPLATE_NAMES,
    alertmanager_alerts,
    email_of,
    filled_template,
    pagerduty_events,
    slack_body,
    webhook_body,
)
from megatrain_launcher.notify.message import Message, PageLinks
from megatrain_launcher.notify.receivers import receivers_of
from megatrain_launcher.notify.sender import NoticeSender, SenderParts
from megatrain_launcher.notify.topic_follower import TopicSnapshot
from megatrain_launcher.notify.topics import Event, Stage, Topic, gone_topic
from tests.helpers.http_receiver import HttpReceiver
from tests.helpers.notification_topics import LINKS, NOW_S, config_with, make_message, make_topic, over
from tests.helpers.ports import free_ports
from tests.helpers.require import require
from tests.helpers.vendor_rules import check_alertmanager, check_pagerduty, check_slack
from tests.helpers.waiting import DEADLINE_S, wait_until

KEY = "0123456789abcdef0123456789abcdef"
NASTY = 'a <!channel> & "quotes" \\ `x` *y* <https://evil.example|click> ' + "long " * 900
MESSAGES = {
    "opened": make_message(),
    "recovered": make_message(over(make_topic())),
    "nasty": make_message(make_topic(what=NASTY, hosts=("<host>",), activity=NASTY)),
    "many": make_message(*(make_topic(f"incident/{number}") for number in range(20)), num_waiting=7),
    "no links": make_message(links=PageLinks()),
    "ended": make_message(make_topic("end/1", event=Event.END, level=HealthLevel.RED, hosts=(), ranks=(), step=None)),
    "gone": make_message(gone_topic("verdict/v1", "open:amber", NOW_S)),
    "planned": make_message(make_topic(level=HealthLevel.GREEN)),
    "long job": make_message(job="j" * 300),
    "clock out of its mind": make_message(make_topic(began_unix_s=1e17)),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_has_the_form_of_its_vendor(name: str) -> None:
    message = MESSAGES[name]
    check_slack(slack_body(message))
    for event in pagerduty_events(message, KEY):
        check_pagerduty(event)
    check_alertmanager(alertmanager_alerts(message))
    mail = email_of(message, "megatrain@example.org", ("a@example.org", "b@example.org"))
    assert all(len(line) <= 998 for line in mail.as_bytes().split(b"\r\n"))  # RFC 5322
    assert json.loads(json.dumps(webhook_body(message)))["job"] == message.job


FORMS: dict[str, Callable[[Message], str]] = {
    "slack": lambda message: json.dumps(slack_body(message)),
    "pagerduty": lambda message: json.dumps(pagerduty_events(message, KEY)),
    "alertmanager": lambda message: json.dumps(alertmanager_alerts(message)),
    "email": lambda message: email_of(message, "a@example.org", ("b@example.org",)).get_content(),
    "webhook": lambda message: json.dumps(webhook_body(message)),
}


def test_the_facts_are_in_every_form() -> None:
    for form, text_of in FORMS.items():
        text = text_of(make_message())
        for fact in (
            "demo", "rank 3 on host-2 was killed by SIGKILL (9)", "host-2" if form == "webhook" else "(rank 3)",
            "restart", "no action is needed", f"{LINKS.page}/#/incidents/one", f"{LINKS.runbooks}/worker-ended.md",
        ):  # fmt: skip
            assert fact in text, (form, fact)
        assert "1,234" in text or "1234" in text, form
        ended = text_of(make_message(over(make_topic())))
        assert "4 steps lost" in ended or '"resolve"' in ended, form


def test_pagerduty_triggers_acknowledges_and_resolves_one_thing() -> None:
    topic = make_topic()
    events = [
        pagerduty_events(make_message(one), KEY)[0]
        for one in (topic, replace(topic, stage=Stage.UNDER_WAY), over(topic))
    ]
    assert [event["event_action"] for event in events] == ["trigger", "acknowledge", "resolve"]
    assert {event["dedup_key"] for event in events} == {"megatrain/demo/incident/one"}
    assert events[0]["payload"]["severity"] == "warning"
    assert events[0]["payload"]["source"] == "host-2"


def test_alert_keeps_its_labels_and_expires() -> None:
    opened, again, ended = (
        alertmanager_alerts(message)[0]
        for message in (
            make_message(),
            make_message(now_unix_s=NOW_S + 60),
            make_message(over(make_topic(what="another text"), NOW_S + 70), now_unix_s=NOW_S + 70),
        )
    )
    assert opened["labels"] == again["labels"] == ended["labels"]
    assert opened["startsAt"] == again["startsAt"] == ended["startsAt"]
    assert opened["endsAt"] == "2027-01-15T08:05:00.000Z"
    assert again["endsAt"] == "2027-01-15T08:06:00.000Z"
    assert ended["endsAt"] == "2027-01-15T08:01:10.000Z"


def test_repeated_email_has_one_id_and_thread() -> None:
    def headers(**changes: Any) -> Any:
        message = make_message(**changes)
        raw = email_of(message, "megatrain@example.org", ("ops@example.org",)).as_bytes()
        return email.message_from_bytes(raw, policy=policy.default)

    first, again = headers(), headers(now_unix_s=NOW_S + 99)
    ended = headers(topics=(over(make_topic()),))
    assert first["Message-ID"] == again["Message-ID"] != ended["Message-ID"]
    assert first["References"] == ended["References"]
    assert (first["From"], first["To"]) == ("megatrain@example.org", "ops@example.org")
    # A long subject is folded, and the blank that marks this is kept.
    assert first["Subject"].lstrip().startswith("[amber] demo: a worker ended")
    assert ended["Subject"].lstrip().startswith("[over] demo: ")


def test_a_title_is_one_line_with_the_severity() -> None:
    assert MESSAGES["opened"].title == "[amber] demo: a worker ended: rank 3 on host-2 was killed by SIGKILL (9)"
    assert MESSAGES["recovered"].title.startswith("[over] demo: a worker ended")
    assert len(MESSAGES["nasty"].title) <= 140
    assert MESSAGES["many"].title.endswith("(and 19 more)")


def test_a_template_is_filled_in_and_nothing_leaves_its_string() -> None:
    template = Template('{"summary": "$title", "nested": {"who": "$where", "do": "$who_acts"}, "price": "$$5"}')
    message = make_message(make_topic(what='he said "no", \\ and left\u2028'))
    filled = json.loads(filled_template(template, message, is_json=True))
    assert filled["summary"] == message.title
    assert filled["nested"] == {"who": "host-2 (rank 3)", "do": "no action is needed"}
    assert filled["price"] == "$5"
    plain = filled_template(Template("$job $level $key"), message, is_json=False)
    assert plain == "demo amber megatrain/demo/incident/one"
    # every name is known
    every = Template(" ".join(f"${name}" for name in TEMPLATE_NAMES))
    assert "megatrain/demo/incident/one" in filled_template(every, make_message(), is_json=False)


CONFIG = "route: {receiver: none}\nreceivers: [{name: none}]\n"


@contextmanager
def alertmanager(directory: Path) -> Iterator[str]:
    """Run an Alertmanager; yield its address."""
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    require("alertmanager", found=program is not None, reason="not on PATH (Debian: prometheus-alertmanager)")
    assert program is not None
    (directory / "alertmanager.yml").write_text(CONFIG)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with (directory / "alertmanager.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program, f"--config.file={directory / 'alertmanager.yml'}", f"--storage.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
            ],
            stdout=log, stderr=log, preexec_fn=partial(install_parent_death_guard, os.getpid()),
        )  # fmt: skip
    try:
        wait_until(lambda: _get(f"{url}/api/v2/status") is not None, "the Alertmanager")
        yield url
    finally:
        process.kill()
        process.wait()


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return json.load(answer)
    except OSError:
        return None


class JobSnapshots:
    """Topics of a job at several moments, and an etcd that accepts every record."""

    def __init__(self, *moments: Topic) -> None:
        self.left = [TopicSnapshot(number, (one,), PageLinks(), 9.0) for number, one in enumerate(moments, 1)]

    def next(self, *_: object) -> TopicSnapshot:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def get(self, key: str) -> None:
        return None

    def txn(self, *_: object, **more: object) -> Any:
        return SimpleNamespace(succeeded=True, revision=1)


def test_alert_of_the_former_level_ends_in_the_same_post(tmp_path: Path) -> None:
    topic = make_topic("restarts", event=Event.RESTARTS)
    story: Any = JobSnapshots(topic, replace(topic, level=HealthLevel.RED))
    leadership: Any = SimpleNamespace(key="leader", token=1, is_certain=True)
    with HttpReceiver() as server:
        (receiver,) = receivers_of(config_with(tmp_path, f'[alertmanager]\nurl = "{server.url}"\n'))
        sender = NoticeSender(SenderParts(story, JobKeys("demo"), leadership, story, lambda: NOW_S), receiver)
        _, second = server.wait_for(2)
        sender.join(DEADLINE_S)
    assert [(one["labels"]["severity"], one["endsAt"]) for one in second] == [
        ("critical", "2027-01-15T08:05:00.000Z"), ("warning", "2027-01-15T08:00:00.000Z"),
    ]  # fmt: skip


@pytest.mark.slow
def test_alerts_fire_and_are_over(tmp_path: Path) -> None:
    now_s = time.time()
    with alertmanager(tmp_path) as url:
        (receiver,) = receivers_of(config_with(tmp_path, f'[alertmanager]\nurl = "{url}"\n'))
        topic = make_topic(began_unix_s=now_s - 2.0)
        other = replace(topic, name="incident/other")
        receiver.try_once(make_message(topic, other, now_unix_s=now_s))
        wait_until(lambda: len(_get(f"{url}/api/v2/alerts") or []) == 2, "two alerts")
        found = {one["labels"]["topic"]: one for one in _get(f"{url}/api/v2/alerts")}
        one = found["incident/one"]
        assert one["status"]["state"] == "active"
        assert one["labels"]["alertname"] == "MegatrainIncident"
        assert one["annotations"]["runbook_url"].endswith("worker-ended.md")
        # A repetition with another text is the same alert.
        receiver.try_once(make_message(replace(topic, what="known better"), other, now_unix_s=now_s))
        wait_until(lambda: "known better" in json.dumps(_get(f"{url}/api/v2/alerts")), "the new text")
        assert len(_get(f"{url}/api/v2/alerts")) == 2
        receiver.try_once(make_message(over(topic, now_s - 1.0), now_unix_s=now_s))
        wait_until(lambda: len(_get(f"{url}/api/v2/alerts")) == 1, "the end of one")
        assert [one["labels"]["topic"] for one in _get(f"{url}/api/v2/alerts")] == ["incident/other"]
