"""Rules of [notify] and of the receivers' sections: no secret is sent where others read it, no setting does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatrain.config.config import Config
from megatrain.config.notify import SWITCHES
from megatrain.config.options import options_of
from megatrain.config.problem import Problem
from megatrain.config.wording import value_text
from megatrain.contracts.addresses import is_loopback
from megatrain.contracts.web_address import WebAddress


def notify_problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with the receivers of notifications."""
    for section, switches in SWITCHES.items():
        yield from _unused_problems(section, getattr(config, section), switches)
    if not config.receivers:
        yield from _unused_problems("notify", config.notify, ())
    for section, name in (("notify", "page_url"), ("notify", "runbooks_url")):
        yield from _address_problems(config, section, name)
    if config.pagerduty.routing_key_file:
        yield from _address_problems(config, "pagerduty", "url", "pagerduty.routing_key_file")
    yield from _address_problems(config, "alertmanager", "url", "alertmanager.token_file")
    yield from _address_problems(config, "webhook", "url", "webhook.token_file")
    if config.webhook.url and config.webhook.url_file:
        yield Problem(
            ("webhook.url", "webhook.url_file"), "webhook.url and url_file are both set; use the one that is meant"
        )
    if config.email.recipients:
        yield from _email_problems(config)


def _unused_problems(section: str, values: Any, switches: tuple[str, ...]) -> Iterator[Problem]:
    """Yield the keys that were set although their section is off."""
    if any(getattr(values, name) for name in switches):
        return
    for name, option in options_of(values.__class__).items():
        if getattr(values, name) != option.default:
            way_out = f"set {' or '.join(f'{section}.{one}' for one in switches)}" if switches else "name a receiver"
            yield Problem(
                (f"{section}.{name}", *(f"{section}.{one}" for one in switches)),
                f"{section}.{name}={value_text(getattr(values, name))} does nothing while nobody is told; {way_out}, "
                f"or leave it out",
            )


def _address_problems(config: Config, section: str, name: str, secret: str = "") -> Iterator[Problem]:
    """Yield what is wrong with an address; `secret`: the key of what is sent along."""
    text = getattr(getattr(config, section), name)
    if not text:
        return
    try:
        address = WebAddress.parse(text)
    except ValueError as error:
        # not shown: what is wrong with it may be that it holds a password
        yield Problem((f"{section}.{name}",), f"{section}.{name} {error}; write https://HOST/PATH")
        return
    holder, _, file = secret.partition(".")
    if file and getattr(getattr(config, holder), file) and not address.is_private:
        yield Problem(
            (f"{section}.{name}", secret),
            f"{section}.{name} is plain http to another machine ({address}), where everybody on the way could read "
            f"what {secret} holds; use https://, or leave {file} out",
        )


def _email_problems(config: Config) -> Iterator[Problem]:
    found = config.email
    for name in ("sender", "host"):
        if not getattr(found, name):
            yield Problem(
                ("email.recipients", f"email.{name}"),
                f'email.recipients needs email.{name}, found ""; set email.{name}',
            )
    if bool(found.user) != bool(found.password_file):
        missing = "password_file" if found.user else "user"
        yield Problem(
            ("email.user", "email.password_file"),
            f'email.user and password_file go together, and email.{missing} is ""; set it, or leave both out',
        )
    if found.encryption == "none" and found.user and not is_loopback(found.host):
        yield Problem(
            ("email.encryption", "email.user", "email.host"),
            'email.encryption="none" would send the password of email.user where everybody on the way can read it; '
            'use "starttls" or "tls"',
        )
