"""Rules of [notify] and of the receivers' sections: no secret is sent where others can read it, and every setting has
an effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatrain.config.config import Config
from megatrain.config.notify import (
    SWITCHES,
    AlertmanagerConfig,
    EmailConfig,
    PagerDutyConfig,
    ReceiverConfig,
    WebhookConfig,
)
from megatrain.config.options import options_of
from megatrain.config.problem import Problem
from megatrain.config.sections import receiver_kind
from megatrain.config.toml_text import value_text
from megatrain.contracts.network_address import WebAddress, is_loopback


def notify_problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with the receivers of notifications."""
    if not config.receivers:
        yield from _unused_problems("notify", config.notify, ())
    for name in ("page_url", "runbooks_url"):
        yield from _address_problems("notify", config.notify, name)
    for section, values in config.sections.items():
        if receiver_kind(section):
            yield from _unused_problems(section, values, SWITCHES[receiver_kind(section)])
            yield from _receiver_problems(section, values)


def _receiver_problems(section: str, values: ReceiverConfig) -> Iterator[Problem]:
    if isinstance(values, PagerDutyConfig) and values.routing_key_file:
        yield from _address_problems(section, values, "url", "routing_key_file")
    elif isinstance(values, AlertmanagerConfig):
        yield from _address_problems(section, values, "url", "token_file")
    elif isinstance(values, EmailConfig) and values.recipients:
        yield from _email_problems(section, values)
    elif isinstance(values, WebhookConfig):
        yield from _address_problems(section, values, "url", "token_file")
        if values.url and values.url_file:
            keys = (f"{section}.url", f"{section}.url_file")
            yield Problem(keys, f"{section}.url and url_file are both set; set only one of them")


def _unused_problems(section: str, values: Any, switches: tuple[str, ...]) -> Iterator[Problem]:
    """Yield the keys that were set although their section is off."""
    if any(getattr(values, name) for name in switches):
        return
    for name, option in options_of(values.__class__).items():
        if getattr(values, name) != option.default:
            hint = f"set {' or '.join(f'{section}.{switch}' for switch in switches)}" if switches else "name a receiver"
            yield Problem(
                (f"{section}.{name}", *(f"{section}.{switch}" for switch in switches)),
                f"{section}.{name}={value_text(getattr(values, name))} does nothing without a receiver; {hint}, "
                f"or leave it out",
            )


def _address_problems(section: str, values: Any, name: str, secret: str = "") -> Iterator[Problem]:
    """Yield what is wrong with an address; `secret`: the key of a file whose content is sent with the requests."""
    text = getattr(values, name)
    if not text:
        return
    key = f"{section}.{name}"
    try:
        address = WebAddress.parse(text)
    except ValueError as error:
        # the address is not shown: it may be wrong because it contains a password
        yield Problem((key,), f"{key} {error}; write https://HOST/PATH")
        return
    if secret and getattr(values, secret) and not address.is_private:
        yield Problem(
            (key, f"{section}.{secret}"),
            f"{key} is plain http to another machine ({address}), so the content of {section}.{secret} could be read "
            f"on the network; use https://, or leave {secret} out",
        )


def _email_problems(section: str, found: EmailConfig) -> Iterator[Problem]:
    for name in ("sender", "host"):
        if not getattr(found, name):
            yield Problem(
                (f"{section}.recipients", f"{section}.{name}"),
                f'{section}.recipients needs {section}.{name}, found ""; set {section}.{name}',
            )
    if bool(found.user) != bool(found.password_file):
        missing = "password_file" if found.user else "user"
        yield Problem(
            (f"{section}.user", f"{section}.password_file"),
            f'{section}.user and password_file go together, and {section}.{missing} is ""; set it, or leave both out',
        )
    if found.encryption == "none" and found.user and not is_loopback(found.host):
        yield Problem(
            (f"{section}.encryption", f"{section}.user", f"{section}.host"),
            f'{section}.encryption="none" would send the password of {section}.user unencrypted over the network; '
            'use "starttls" or "tls"',
        )
