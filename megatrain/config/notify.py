"""Sections [notify], [slack], [pagerduty], [email], [alertmanager], [webhook]: the receivers of a job's notifications.

There may be several receivers of each kind: two tables [[slack]] are the sections [slack] and [slack-2].

A secret is given as a file that contains it, because the configuration itself is shown, compared and kept in etcd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatrain.config.options import option

EVENTS = ("incident", "restarts", "end", "verdict", "health")
SWITCHES = {
    "slack": ("url_file",),
    "pagerduty": ("routing_key_file",),
    "email": ("recipients",),
    "alertmanager": ("url",),
    "webhook": ("url", "url_file"),
}
"""Section of a receiver -> its keys that switch it on when at least one is set."""
_EVENT = f"({'|'.join(EVENTS)})"
_ADDRESS = r"[^\s@<>,;:\"()\[\]\\]+@[A-Za-z0-9.-]+"
_SECRET = "readable only by its owner"


def _events() -> str:
    """Return the field that every receiver has: the events that it gets."""
    return option(
        ", ".join(EVENTS),
        "Events to send, comma-separated: `incident` (opened, recovered), `restarts` (close to the limit of restarts), "
        "`end` (the job ended), `verdict` (a verdict waits for approval), `health` (the job's health changed).",
        pattern=f"{_EVENT}(, *{_EVENT})*",
    )


def _level() -> Any:
    """Return the field that every receiver has: the lowest level that it gets."""
    return option(
        "amber",
        "Lowest level that is sent: `red` (the job cannot continue by itself), `amber` (the job recovers by "
        "itself, or needs an answer), `green` (also planned events).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyConfig:
    """The settings that all receivers of notifications share. A receiver is on if its own section has an address.

    There may be up to 16 of each kind: two tables `[[slack]]` are the same as `[slack]` and `[slack-2]`.
    """

    page_url: str = option(
        "", "URL of the dashboard for links in messages. Empty: the address that the dashboard announces."
    )
    runbooks_url: str = option(
        "", "URL of docs/runbooks for links in messages. Empty: runbooks are named without a link."
    )
    ca_file: str = option(
        "",
        "PEM file of the certificate authority that signed the receivers' certificates. Empty: the authorities of "
        "the system.",
    )
    timeout_s: float = option(
        10.0, "A receiver that has not answered within this time is tried again later.", unit="s", above=0, maximum=60
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlackConfig:
    """A channel of Slack, by an incoming webhook."""

    url_file: str = option("", f"File, {_SECRET}, with the webhook's URL, which is a secret. Empty: off.")
    events: str = _events()
    level: Literal["green", "amber", "red"] = _level()


@dataclass(frozen=True, slots=True, kw_only=True)
class PagerDutyConfig:
    """A service of PagerDuty, by an integration of the Events API v2."""

    routing_key_file: str = option("", f"File, {_SECRET}, with the integration's key. Empty: off.")
    url: str = option(
        "https://events.pagerduty.com/v2/enqueue",
        "URL that events are sent to; https://events.eu.pagerduty.com/v2/enqueue in Europe.",
    )
    events: str = _events()
    level: Literal["green", "amber", "red"] = _level()


@dataclass(frozen=True, slots=True, kw_only=True)
class EmailConfig:
    """E-mail, by an SMTP server."""

    recipients: str = option("", "Addresses, comma-separated. Empty: off.", pattern=f"({_ADDRESS}(, *{_ADDRESS})*)?")
    sender: str = option("", "Address in the From header.", pattern=f"({_ADDRESS})?")
    host: str = option("", "Host name or address of the SMTP server.", pattern=r"[A-Za-z0-9._:-]*")
    port: int = option(587, "Port of the SMTP server.", minimum=1, maximum=65535)
    encryption: Literal["starttls", "tls", "none"] = option(
        "starttls",
        "`starttls` (usually port 587), `tls` from the first byte (usually port 465), or `none`, which allows a login "
        "only if host is this machine.",
    )
    user: str = option("", "Name to log in with. Empty: no login.")
    password_file: str = option("", f"File, {_SECRET}, with the password of user.")
    events: str = _events()
    level: Literal["green", "amber", "red"] = _level()


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertmanagerConfig:
    """An Alertmanager of Prometheus, by its API v2."""

    url: str = option("", "URL of the Alertmanager with its path prefix, such as http://alertmanager:9093. Empty: off.")
    token_file: str = option("", f"File, {_SECRET}, with the bearer token that it requires. Empty: none.")
    events: str = _events()
    level: Literal["green", "amber", "red"] = _level()


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """Any other program, by an HTTP POST."""

    url: str = option("", "URL that messages are sent to. Empty: off, unless url_file is set.")
    url_file: str = option("", f"File, {_SECRET}, with the URL, if the URL is a secret.")
    token_file: str = option("", f"File, {_SECRET}, with a bearer token to send along. Empty: none.")
    template_file: str = option(
        "",
        "File with a template of the body, in which $title, $text and more are replaced. Empty: JSON with all fields.",
    )
    content_type: str = option(
        "application/json",
        "Content type of the body. In a template of application/json, the values of $title, $text and so on are "
        "escaped as in a JSON string.",
        pattern=r"[a-z]+/[a-z0-9.+-]+(; ?charset=[A-Za-z0-9-]+)?",
    )
    events: str = _events()
    level: Literal["green", "amber", "red"] = _level()


ReceiverConfig = SlackConfig | PagerDutyConfig | EmailConfig | AlertmanagerConfig | WebhookConfig
