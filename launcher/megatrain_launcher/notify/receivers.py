"""The receivers of a configuration: what each gets, in which form, and at which address.

Their secrets are read again for each message, from files of the job's user, so that a new secret needs no restart.
"""

from __future__ import annotations

import json
import os
import ssl
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from megatrain.config.config import Config
from megatrain.config.notify import (
    AlertmanagerConfig,
    EmailConfig,
    NotifyConfig,
    PagerDutyConfig,
    ReceiverConfig,
    SlackConfig,
    WebhookConfig,
)
from megatrain.config.sections import receiver_kind
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.own_files import open_own_file
from megatrain.contracts.network_address import WebAddress
from megatrain_job.coordination.transport import Deadline
from megatrain_job.jobs.health import HealthLevel
from megatrain_launcher.notify.delivery import DeliveryError, post, read_template, tls_context
from megatrain_launcher.notify.formats import (
    TEMPLATE_NAMES,
    alertmanager_alerts,
    email_of,
    filled_template,
    pagerduty_events,
    slack_body,
    webhook_body,
)
from megatrain_launcher.notify.mail import MailServer, send_mail
from megatrain_launcher.notify.message import Message
from megatrain_launcher.notify.plan import DeliveryMode, Rules

_ALERTS_PATH = "/api/v2/alerts"
Send = Callable[[Message, float], str]
"""Delivers a message within the given seconds, and returns the answer. Raises: DeliveryError, ConfigError."""
Open = Callable[[str, Any, NotifyConfig], Send]
"""Reads the files that a receiver's named section refers to. Raises: ConfigError."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """One receiver of a job. Secrets and templates are read again for each message."""

    name: str
    """The section's name: the kind of receiver, with a number if there are several."""
    rules: Rules
    section: ReceiverConfig
    common: NotifyConfig

    def problem(self) -> str:
        """Return why no message could be sent even if the receiver answers; empty if no reason is known."""
        try:
            self._open()
        except ConfigError as error:
            return "; ".join(error.problems)
        return ""

    def try_once(self, message: Message, timeout_s: float | None = None) -> str:
        """Deliver a message, and return the answer. Raises: DeliveryError."""
        limit_s = self.common.timeout_s
        try:
            send = self._open()
            return send(message, limit_s if timeout_s is None else min(limit_s, timeout_s))
        except ConfigError as error:
            raise DeliveryError("; ".join(error.problems)) from error

    def _open(self) -> Send:
        """Raises: ConfigError."""
        _, opened = _KINDS[receiver_kind(self.name)]
        return opened(self.name, self.section, self.common)


def receivers_of(config: Config) -> tuple[Receiver, ...]:
    """Return the receivers that are switched on."""
    return tuple(_receiver(config, name) for name in config.receivers)


def _receiver(config: Config, name: str) -> Receiver:
    section: ReceiverConfig = config.sections[name]
    delivery_mode, _ = _KINDS[receiver_kind(name)]
    rules = Rules(delivery_mode, HealthLevel(section.level), frozenset(_listed(section.events)))
    return Receiver(name, rules, section, config.notify)


def _open_slack(name: str, found: SlackConfig, common: NotifyConfig) -> Send:
    address = _secret_address(found.url_file, f"{name}.url_file")

    def send(message: Message, timeout_s: float) -> str:
        return post(address, _encoded(slack_body(message)), _context(common), timeout_s=timeout_s)

    return send


def _open_pagerduty(name: str, found: PagerDutyConfig, common: NotifyConfig) -> Send:
    key = read_secret(found.routing_key_file, f"{name}.routing_key_file")
    address = WebAddress.parse(found.url)

    def send(message: Message, timeout_s: float) -> str:
        answer, context, deadline = "", _context(common), Deadline(timeout_s)
        for event in pagerduty_events(message, key):
            left_s = max(deadline.left_s, _MIN_TIMEOUT_S)
            answer = post(address, _encoded(event), context, secrets=(key,), timeout_s=left_s)
        return answer

    return send


def _open_alertmanager(name: str, found: AlertmanagerConfig, common: NotifyConfig) -> Send:
    address = WebAddress.parse(found.url)
    address = replace(address, target=f"{address.target.rstrip('/')}{_ALERTS_PATH}")
    bearer = _optional_secret(found.token_file, f"{name}.token_file")

    def send(message: Message, timeout_s: float) -> str:
        body = _encoded(alertmanager_alerts(message))
        return post(address, body, _context(common), bearer=bearer, timeout_s=timeout_s)

    return send


def _open_email(name: str, found: EmailConfig, common: NotifyConfig) -> Send:
    password = _optional_secret(found.password_file, f"{name}.password_file")

    def send(message: Message, timeout_s: float) -> str:
        server = MailServer(found.host, found.port, found.encryption, _context(common), found.user, password)
        return send_mail(email_of(message, found.sender, _listed(found.recipients)), server, timeout_s)

    return send


def _open_webhook(name: str, found: WebhookConfig, common: NotifyConfig) -> Send:
    address = WebAddress.parse(found.url) if found.url else _secret_address(found.url_file, f"{name}.url_file")
    bearer = _optional_secret(found.token_file, f"{name}.token_file")
    template_key = f"{name}.template_file={found.template_file!r}"
    template = _template(found.template_file, template_key) if found.template_file else None

    def send(message: Message, timeout_s: float) -> str:
        body = _encoded(webhook_body(message)) if template is None else _filled(template, message, found, template_key)
        return post(
            address, body, _context(common), content_type=found.content_type, bearer=bearer, timeout_s=timeout_s
        )  # fmt: skip

    return send


_KINDS: Mapping[str, tuple[DeliveryMode, Open]] = {
    "slack": (DeliveryMode.DIGEST, _open_slack),
    "pagerduty": (DeliveryMode.PAGE, _open_pagerduty),
    "email": (DeliveryMode.DIGEST, _open_email),
    "alertmanager": (DeliveryMode.STATE, _open_alertmanager),
    "webhook": (DeliveryMode.DIGEST, _open_webhook),
}
_MIN_TIMEOUT_S = 0.001
"""The shortest timeout of a request when several share a deadline; the request then fails as for a late answer."""


def _encoded(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def _optional_secret(path: str, key: str) -> str:
    return read_secret(path, key) if path else ""


def _secret_address(path: str, key: str) -> WebAddress:
    """Return the address in a file; the address is as secret as a password. Raises: ConfigError."""
    text = read_secret(path, key)
    try:
        address = WebAddress.parse(text)
    except ValueError as error:
        raise ConfigError([f"{key}: the address in {path} {error}"]) from None  # the cause may show the text
    if not address.is_private:
        problem = f"{key}: {path} holds plain http to another machine"
        raise ConfigError([f"{problem}, so every machine on the way can read it; use https"])
    return address


def _context(common: NotifyConfig) -> ssl.SSLContext:
    return tls_context(common.ca_file)


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _template(path: str, key: str) -> Template:
    """Return a webhook's own template. Raises: ConfigError."""
    template = Template(read_template(path, key))
    if not template.is_valid():
        raise ConfigError([f"{key} has a $ that does not begin a name; write $$ for a dollar sign"])
    unknown = sorted(set(template.get_identifiers()) - set(TEMPLATE_NAMES))
    if unknown:
        raise ConfigError([f"{key} has the unknown name ${unknown[0]}; the names are {', '.join(TEMPLATE_NAMES)}"])
    return template


def _filled(template: Template, message: Message, found: WebhookConfig, key: str) -> bytes:
    """Return the body of a webhook by its own template. Raises: ConfigError."""
    is_json = found.content_type.partition(";")[0] == "application/json"
    body = filled_template(template, message, is_json=is_json)
    if is_json:
        try:
            json.loads(body)
        except ValueError as error:
            problem = f"{key} is not JSON once it is filled in: {error}; put each name between quotes"
            raise ConfigError([problem]) from error
    return body.encode()


_MAX_SECRET_BYTES = 4096


def read_secret(path: str, key: str) -> str:
    """Return the one line of a file that only its user can read. `key`: the option that names the file, for errors.

    Raises: ConfigError, which never contains the file's content.
    """
    try:
        with open(open_own_file(Path(path), os.O_RDONLY), "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            raw = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError([f"{key}: {path} cannot be used: {error.strerror}; name a file of your own"]) from error
    if mode & 0o077:
        raise ConfigError(
            [f"{key}: {path} has mode {mode:o}, and others may have read it; set it to 600 and renew the secret in it"]
        )
    try:
        text = raw.decode("ascii").strip() if len(raw) <= _MAX_SECRET_BYTES else ""
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable() or " " in text:
        raise ConfigError([f"{key}: {path} holds no secret: expected one line of ASCII without spaces"])
    return text
