"""Formats a message as the bodies that receivers accept. Pure functions: no I/O and no clock.

Formats as their vendors document them: Slack's incoming webhooks and Block Kit; PagerDuty's Events API v2; the OpenAPI
description of Alertmanager's API v2; RFC 5322 for e-mail. tests/helpers/vendor_rules.py holds their rules.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from string import Template
from typing import Any

from megatrain.formatting import count_text
from megatrain_job.jobs.health import HealthLevel
from megatrain_launcher.notify.message import Message
from megatrain_launcher.notify.plan import REFRESH_S
from megatrain_launcher.notify.topics import Stage, Topic

_SLACK_HEADER, _SLACK_SECTION, _SLACK_BLOCKS = 150, 3000, 50
_PAGERDUTY_SUMMARY = 1024
_EXPIRES_REFRESHES = 5
"""After this many missed repeats an Alertmanager ends an alert, because the job's driver must be gone."""
_SEVERITIES = {HealthLevel.RED: "critical", HealthLevel.AMBER: "warning", HealthLevel.GREEN: "info"}
_SIGNS = {HealthLevel.RED: ":red_circle:", HealthLevel.AMBER: ":large_orange_circle:", HealthLevel.GREEN: ""}
_ACTIONS = {Stage.OPEN: "trigger", Stage.UNDER_WAY: "acknowledge", Stage.CLOSED: "resolve"}
_CUT = "..."


def slack_body(message: Message) -> dict[str, Any]:
    """Return the JSON of an incoming webhook. Phones show `text` in their notifications.

    All texts except the links are plain, so nothing in a quoted log line becomes a link, a mention or a format.
    """
    sign = ":white_check_mark:" if message.is_over else _SIGNS[message.level]
    blocks = [{"type": "header", "text": _plain(f"{sign} {message.title}".strip(), _SLACK_HEADER, has_signs=True)}]
    for topic in message.topics:
        text = "\n".join(f"{name}: {value}" for name, value in message.facts(topic))
        blocks.append({"type": "section", "text": _plain(text, _SLACK_SECTION)})
        links = [
            f"<{address}|{label}>"
            for address, label in (
                (message.links.page_of(topic), "Dashboard"),
                (message.links.runbook_of(topic), "Runbook"),
            )
            if re.fullmatch(r"https?://[^\s<>|]+", address)
        ]
        if links:
            blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": "  ".join(links)}})
    if message.num_waiting:
        text = f"{message.num_waiting} more will be sent later, to limit the number of messages."
        blocks.append({"type": "section", "text": _plain(text, _SLACK_SECTION)})
    return {"text": _escaped(message.title), "mrkdwn": False, "blocks": blocks[:_SLACK_BLOCKS]}


def _plain(text: str, longest: int, *, has_signs: bool = False) -> dict[str, Any]:
    return {"type": "plain_text", "text": _escaped(_cut(text, longest // 2)), "emoji": has_signs}


def _escaped(text: str) -> str:
    """Return text with the three escapes that Slack requires."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def pagerduty_events(message: Message, routing_key: str) -> list[dict[str, Any]]:
    """Return the events of the Events API v2, one per topic.

    The worst topic comes last. If an event cannot be sent, all are sent again.
    """
    return [_pagerduty_event(message, topic, routing_key) for topic in reversed(message.topics)]


def _pagerduty_event(message: Message, topic: Topic, routing_key: str) -> dict[str, Any]:
    event: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": _ACTIONS[topic.stage],
        "dedup_key": message.key_of(topic),
    }
    if topic.stage is not Stage.OPEN:
        return event
    facts = dict(message.facts(topic))
    if message.num_waiting:
        facts["waiting"] = f"{count_text(message.num_waiting, 'further topic')} will be sent later"
    event["payload"] = {
        "summary": _cut(f"{message.job}: {topic.what}", _PAGERDUTY_SUMMARY),
        "source": topic.hosts[0] if topic.hosts else message.job,
        "severity": _SEVERITIES[topic.level],
        "timestamp": _time(topic.began_unix_s),
        "component": "megatrain",
        "group": message.job,
        "class": str(topic.event),
        "custom_details": facts,
    }
    page, runbook = message.links.page_of(topic), message.links.runbook_of(topic)
    links = [(page, "Dashboard"), (runbook if "://" in runbook else "", "Runbook")]
    event["links"] = [{"href": href, "text": text} for href, text in links if href]
    event["client"] = "megatrain"
    return event


def alertmanager_alerts(message: Message) -> list[dict[str, Any]]:
    """Return the alerts of a POST to /api/v2/alerts.

    The labels of a topic stay the same while its level stays the same. The alert with the former level is resolved.
    """
    return [_alert(message, topic) for topic in (*message.topics, *message.outdated)]


def _alert(message: Message, topic: Topic) -> dict[str, Any]:
    is_over = topic.stage is Stage.CLOSED
    ends_unix_s = topic.ended_unix_s if is_over else message.now_unix_s + _EXPIRES_REFRESHES * REFRESH_S
    facts = dict(message.facts(topic))
    annotations = {
        "summary": f"{message.job}: {topic.what}",
        "description": "\n".join(f"{name}: {value}" for name, value in facts.items()),
    }
    runbook = message.links.runbook_of(topic)
    if runbook:
        annotations["runbook_url"] = runbook
    alert: dict[str, Any] = {
        "labels": {
            "alertname": f"Megatrain{str(topic.event).capitalize()}",
            "job_name": message.job,
            "topic": topic.name,
            "severity": _SEVERITIES[topic.level],
        },
        "annotations": annotations,
        "startsAt": _time(min(topic.began_unix_s, ends_unix_s or topic.began_unix_s)),
        "endsAt": _time(ends_unix_s or message.now_unix_s),
    }
    page = message.links.page_of(topic)
    if page:
        alert["generatorURL"] = page
    return alert


def email_of(message: Message, sender: str, recipients: tuple[str, ...]) -> EmailMessage:
    """Return the e-mail. A message that is sent twice keeps its Message-ID; messages with the same first topic form a
    thread.
    """
    mail = EmailMessage(policy=SMTP)
    mail["Subject"] = message.title
    mail["From"] = sender
    mail["To"] = ", ".join(recipients)
    mail["Date"] = format_datetime(datetime.fromtimestamp(message.now_unix_s, UTC))
    marks = ";".join(f"{topic.name}={topic.mark}" for topic in message.topics)
    mail["Message-ID"] = _message_id(f"{message.job}\n{marks}")
    thread = _message_id(message.key_of(message.lead))
    mail["In-Reply-To"] = thread
    mail["References"] = thread
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(f"{message.text}\n", cte="quoted-printable")
    return mail


def _message_id(text: str) -> str:
    return f"<{hashlib.sha256(text.encode()).hexdigest()[:40]}@megatrain.invalid>"


def webhook_body(message: Message) -> dict[str, Any]:
    """Return the JSON for a webhook without a template."""
    return {
        "schema_version": 1,
        "job": message.job,
        "level": str(message.level),
        "is_over": message.is_over,
        "title": message.title,
        "text": message.text,
        "at": _time(message.now_unix_s),
        "num_waiting": message.num_waiting,
        "topics": [_topic_document(message, topic) for topic in message.topics],
    }


def _topic_document(message: Message, topic: Topic) -> dict[str, Any]:
    return {
        "key": message.key_of(topic),
        "topic": topic.name,
        "event": str(topic.event),
        "level": str(topic.level),
        "stage": str(topic.stage),
        "what": topic.what,
        "hosts": list(topic.hosts),
        "ranks": list(topic.ranks),
        "step": topic.step,
        "began_unix_s": topic.began_unix_s,
        "ended_unix_s": topic.ended_unix_s,
        "lost": topic.cost,
        "now": topic.activity,
        "who_acts": topic.action,
        "page": message.links.page_of(topic),
        "runbook": message.links.runbook_of(topic),
    }


TEMPLATE_NAMES = (
    "job", "level", "is_over", "title", "text", "at", "key", "topic", "event", "stage", "what", "where", "hosts",
    "ranks", "step", "lost", "now", "who_acts", "page", "runbook",
)  # fmt: skip
"""The names that a template may contain: fields of the message, and of its first topic."""


def filled_template(template: Template, message: Message, *, is_json: bool) -> str:
    """Return a webhook's own template with a message filled in; `is_json`: each text escaped as in a JSON string."""
    topic, values = message.lead, webhook_body(message)
    values |= _topic_document(message, topic)
    values |= {
        "level": str(message.level),
        "is_over": str(message.is_over).lower(),
        "where": topic.where,
        "hosts": ", ".join(topic.hosts),
        "ranks": ", ".join(map(str, topic.ranks)),
        "step": "" if topic.step is None else str(topic.step),
    }
    texts: Mapping[str, str] = {name: str(values[name]) for name in TEMPLATE_NAMES}
    return template.substitute({name: json.dumps(text)[1:-1] if is_json else text for name, text in texts.items()})


def _time(unix_s: float) -> str:
    """Return a time in RFC 3339; the epoch if the time is too large for a date."""
    try:
        moment = datetime.fromtimestamp(unix_s, UTC)
    except (ValueError, OverflowError, OSError):
        moment = datetime.fromtimestamp(0, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - len(_CUT)] + _CUT
