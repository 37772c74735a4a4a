"""The published requirements of the receivers. Each function raises AssertionError for a message that the receiver
would refuse.

Slack: "Sending messages using incoming webhooks", "Reference: blocks", "Formatting text for app surfaces".
PagerDuty: "Events API v2: send an alert event" of its developer documentation.
Alertmanager: `api/v2/openapi.yaml` of its repository (postableAlerts).
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

_SLACK_TEXTS = {"header": 150, "section": 3000}
_SLACK_TYPES = {"header", "section", "divider", "context"}
_PAGERDUTY_ACTIONS = {"trigger", "acknowledge", "resolve"}
_PAGERDUTY_SEVERITIES = {"critical", "error", "warning", "info"}
_PAGERDUTY_KEYS = {
    "routing_key", "event_action", "dedup_key", "payload", "images", "links", "client", "client_url",
}  # fmt: skip
_PAGERDUTY_PAYLOAD = {
    "summary", "source", "severity", "timestamp", "component", "group", "class", "custom_details",
}  # fmt: skip
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def check_slack(body: Any) -> None:
    assert isinstance(body["text"], str)
    assert body["text"]
    assert 1 <= len(body["blocks"]) <= 50
    for block in body["blocks"]:
        assert block["type"] in _SLACK_TYPES, block
        text = block["text"]
        assert text["type"] in (("plain_text",) if block["type"] == "header" else ("plain_text", "mrkdwn"))
        assert 1 <= len(text["text"]) <= _SLACK_TEXTS[block["type"]], block
        # &, < and > are control characters: they are escaped, except in the links that we create
        bare = (
            re.sub(r"<https?://[^<>|\s]+\|[A-Za-z ]+>", "", text["text"]) if text["type"] == "mrkdwn" else text["text"]
        )
        assert not re.search(r"[<>]|&(?!amp;|lt;|gt;)", bare), text
        assert "emoji" not in text or text["type"] == "plain_text"


def check_pagerduty(event: Any) -> None:
    assert set(event) <= _PAGERDUTY_KEYS, event
    assert re.fullmatch(r"[0-9a-zA-Z]{32}", event["routing_key"])
    assert event["event_action"] in _PAGERDUTY_ACTIONS
    assert 1 <= len(event["dedup_key"]) <= 255
    assert len(json.dumps(event)) <= 512 * 1024
    if event["event_action"] != "trigger":
        return
    payload = event["payload"]
    assert set(payload) <= _PAGERDUTY_PAYLOAD
    assert 1 <= len(payload["summary"]) <= 1024
    assert payload["source"]
    assert payload["severity"] in _PAGERDUTY_SEVERITIES
    _check_time(payload["timestamp"])
    for link in event.get("links", []):
        assert link["href"].startswith(("https://", "http://"))


def check_alertmanager(alerts: Any) -> None:
    assert isinstance(alerts, list)
    for alert in alerts:
        assert set(alert) <= {"labels", "annotations", "startsAt", "endsAt", "generatorURL"}
        assert alert["labels"]["alertname"]
        for names in (alert["labels"], alert["annotations"]):
            assert all(_LABEL.fullmatch(name) and isinstance(value, str) for name, value in names.items())
        assert _check_time(alert["startsAt"]) <= _check_time(alert["endsAt"])


def _check_time(text: str) -> datetime:
    """RFC 3339, with a zone."""
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    assert moment.tzinfo is not None
    return moment
