"""Every option of [notify] and of the receivers' sections has its effect in a launched job whose rank is killed.

Each kind of receiver exists three times: with defaults, for the end of the job only, and for the level red only.
"""

from __future__ import annotations

import email
import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from email import policy
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.notify import (
    AlertmanagerConfig,
    EmailConfig,
    NotifyConfig,
    PagerDutyConfig,
    SlackConfig,
    WebhookConfig,
)
from tests.helpers.certificates import Authority
from tests.helpers.http_receiver import HttpReceiver, ReceiverReply
from tests.helpers.mail_receiver import MailReceiver
from tests.helpers.notification_topics import write_secret
from tests.helpers.recovery_checks import ENDLESS, running_job
from tests.helpers.waiting import wait_until

# aiosmtpd warns of a login without encryption, which one of the receivers uses.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")]

KINDS = ("slack", "pagerduty", "email", "alertmanager", "webhook")
KEY, TOKEN, PASSWORD = "0123456789abcdef0123456789abcdef", "t" * 40, "a-secret-password"
PAGE, RUNBOOKS = "https://page.example/megatrain", "https://docs.example/runbooks"
SENDER, RECIPIENTS = "megatrain@example.org", "a@example.org, b@example.org"


@dataclass(frozen=True, slots=True)
class Sent:
    """The messages that the receivers got: `https` uses TLS, with a certificate of an authority that the system
    lacks."""

    https: HttpReceiver
    mail: MailReceiver
    log: str

    def bodies(self, path: str) -> list[str]:
        return [one.body.decode() for one in self.https.posted if one.path == path]

    def headers(self, path: str) -> dict[str, str]:
        return dict(next(one.headers for one in self.https.posted if one.path == path))

    def mails(self, recipient: str) -> list[str]:
        return [str(one.content, "utf-8") for one in self.mail.mails if recipient in one.rcpt_tos]  # type: ignore[arg-type]  # bytes, as it is not decoded


def test_each_option_of_notify_takes_effect(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    with ExitStack() as stack:
        https = stack.enter_context(HttpReceiver(tls=authority.sign("receiver")))
        mail = stack.enter_context(MailReceiver("starttls", authority.sign("mail"), ("megatrain", PASSWORD)))
        late = stack.enter_context(HttpReceiver(usual=ReceiverReply(hold=threading.Event())))
        sections = {**receivers(tmp_path, https, mail), "webhook-4": {"url": late.url}}
        sections["notify"] = {
            "page_url": PAGE, "runbooks_url": RUNBOOKS, "ca_file": str(authority.files.certificate), "timeout_s": 0.5,
        }  # fmt: skip
        settings = {"train": {"steps": ENDLESS}}
        with running_job(tmp_path / "job", settings, sections, pace_s=0.3, orders=[(1, 12, "kill")]) as running:
            running.view.wait_recovered(0)
            wait_until(lambda: len(https.posted) >= 8 and len(mail.mails) >= 2, "the messages of the incident")
            wait_until(lambda: "webhook-4" in running.launched.log(running.view.driver()), "a late answer")
            running.save_and_stop()
            log = "".join(running.launched.log(host) for host in ("host-0", "host-1"))
        sent = Sent(https, mail, log)
    for option, check in CHECKS.items():
        print(option)
        check(sent)


def receivers(root: Path, https: HttpReceiver, mail: MailReceiver) -> dict[str, dict[str, Any]]:
    """Return the sections of three receivers of each kind."""

    def secret(name: str, text: str) -> str:
        return write_secret(root / name, text)

    (root / "template").write_text("$job: $event $stage\n")
    sections: dict[str, dict[str, Any]] = {}
    for number, more in ((1, {}), (2, {"events": "end", "level": "green"}), (3, {"level": "red"})):
        own: dict[str, dict[str, Any]] = {
            "slack": {"url_file": secret(f"slack-{number}", f"{https.url}/slack-{number}")},
            "pagerduty": {"url": f"{https.url}/pagerduty-{number}", "routing_key_file": secret("key", KEY)},
            "alertmanager": {"url": f"{https.url}/alerts-{number}", "token_file": secret("token", TOKEN)},
            "email": {
                "recipients": RECIPIENTS if number == 1 else f"{number}@example.org", "sender": SENDER,
                "host": "127.0.0.1", "port": mail.port, "encryption": "starttls", "user": "megatrain",
                "password_file": secret("password", PASSWORD),
            },
            "webhook": {"url": f"{https.url}/webhook-{number}", "token_file": secret("token", TOKEN)},
        }  # fmt: skip
        if number == 1:
            own["webhook"] = {
                "url_file": secret("webhook", f"{https.url}/webhook-1"), "token_file": secret("token", TOKEN),
                "template_file": str(root / "template"), "content_type": "text/plain; charset=utf-8",
            }  # fmt: skip
        sections |= {kind if number == 1 else f"{kind}-{number}": {**own[kind], **more} for kind in KINDS}
    return sections


PATHS = {"slack": "/slack-{}", "pagerduty": "/pagerduty-{}", "alertmanager": "/alerts-{}/api/v2/alerts",
         "webhook": "/webhook-{}"}  # fmt: skip


def received(sent: Sent, kind: str, number: int) -> list[str]:
    if kind == "email":
        return sent.mails("a@example.org" if number == 1 else f"{number}@example.org")
    return sent.bodies(PATHS[kind].format(number))


def sees_events(kind: str) -> Callable[[Sent], None]:
    """The second receiver gets the end of the job, and no message about the incident."""

    def check(sent: Sent) -> None:
        assert len(received(sent, kind, 1)) >= 1
        assert len(received(sent, kind, 2)) == 1, received(sent, kind, 2)

    return check


def sees_level(kind: str) -> Callable[[Sent], None]:
    """The third receiver gets no message: all events were amber and green."""

    def check(sent: Sent) -> None:
        assert received(sent, kind, 3) == []

    return check


def contains(found: Callable[[Sent], str], text: str) -> Callable[[Sent], None]:
    def check(sent: Sent) -> None:
        assert text in found(sent)

    return check


def first_mail(sent: Sent) -> Any:
    return email.message_from_string(sent.mails("a@example.org")[0], policy=policy.default)


def sees_login(sent: Sent) -> None:
    """The server accepts mail only after STARTTLS and a login."""
    assert sent.mail.mails


def sees_all(sent: Sent) -> None:
    """All receivers but one have a certificate of the authority in `ca_file`."""
    assert all(received(sent, kind, 1) for kind in KINDS)


def sees_recipients(sent: Sent) -> None:
    assert sent.mail.mails[0].rcpt_tos == RECIPIENTS.split(", ")


def sees_documents(sent: Sent) -> None:
    assert [json.loads(body)["topics"][0]["event"] for body in received(sent, "webhook", 2)] == ["end"]


def sees_template(sent: Sent) -> None:
    assert received(sent, "webhook", 1)[0] == "job: incident open\n"


CHECKS: dict[str, Callable[[Sent], None]] = {
    "notify.page_url": contains(lambda sent: received(sent, "slack", 1)[0], PAGE),
    "notify.runbooks_url": contains(lambda sent: received(sent, "slack", 1)[0], RUNBOOKS),
    "notify.ca_file": sees_all,
    "notify.timeout_s": contains(lambda sent: sent.log, "no answer within 0.5 s"),
    "slack.url_file": contains(lambda sent: received(sent, "slack", 1)[0], "killed by SIGKILL"),
    "pagerduty.url": contains(lambda sent: received(sent, "pagerduty", 1)[0], "killed by SIGKILL"),
    "pagerduty.routing_key_file": contains(lambda sent: received(sent, "pagerduty", 1)[0], KEY),
    "email.recipients": sees_recipients,
    "email.sender": contains(lambda sent: str(first_mail(sent)["From"]), SENDER),
    "email.host": sees_login,
    "email.port": sees_login,
    "email.encryption": sees_login,
    "email.user": sees_login,
    "email.password_file": sees_login,
    "alertmanager.url": contains(lambda sent: received(sent, "alertmanager", 1)[0], "killed by SIGKILL"),
    "alertmanager.token_file": contains(
        lambda sent: sent.headers(PATHS["alertmanager"].format(1))["authorization"], f"Bearer {TOKEN}"
    ),
    "webhook.url": sees_documents,
    "webhook.url_file": contains(lambda sent: received(sent, "webhook", 1)[0], "incident"),
    "webhook.token_file": contains(lambda sent: sent.headers("/webhook-1")["authorization"], f"Bearer {TOKEN}"),
    "webhook.template_file": sees_template,
    "webhook.content_type": contains(
        lambda sent: sent.headers("/webhook-1")["content-type"], "text/plain; charset=utf-8"
    ),
    **{f"{kind}.events": sees_events(kind) for kind in KINDS},
    **{f"{kind}.level": sees_level(kind) for kind in KINDS},
}
"""Option -> its check."""


def test_no_option_is_missing_here() -> None:
    sections = {
        "notify": NotifyConfig, "slack": SlackConfig, "pagerduty": PagerDutyConfig, "email": EmailConfig,
        "alertmanager": AlertmanagerConfig, "webhook": WebhookConfig,
    }  # fmt: skip
    assert CHECKS.keys() == {f"{name}.{field.name}" for name, kind in sections.items() for field in fields(kind)}
