"""One attempt to deliver a message by HTTP: its errors, and when to try again."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.network_address import WebAddress
from megatrain.formatting import printable, short
from megatrain_job.coordination.errors import InvalidResponseError
from megatrain_job.coordination.http_exchange import HttpExchange
from megatrain_job.coordination.settings import Endpoint
from megatrain_job.coordination.transport import Deadline, EtcdConnection, failure_text

_MAX_ANSWER_BYTES = 64 << 10
_MAX_ANSWER_CHARS = 200
_BUSY = (429, 503)
"""Statuses that may come with a Retry-After header."""
MAX_RETRY_AFTER_S = 3600.0


class DeliveryError(Exception):
    """A receiver has not accepted a message. `retry_after_s`: the wait that the receiver asked for; 0: none."""

    def __init__(self, text: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Return the TLS context for receivers: certificates and names are checked. Raises: ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"notify.ca_file={ca_file!r} cannot be used: {reason}; name a PEM file"]) from error


def post(
    address: WebAddress,
    body: bytes,
    context: ssl.SSLContext,
    *,
    content_type: str = "application/json",
    bearer: str = "",
    secrets: Sequence[str] = (),
    timeout_s: float,
) -> str:
    """Send one request, and return the answer, short and printable. Redirects are not followed.

    The address's path, the bearer token and `secrets` never appear in the answer or in an error's text.
    Raises: DeliveryError.
    """
    token = f"Bearer {bearer}" if bearer else None
    exchange = HttpExchange(
        address.authority, address.target, body, token, is_last=True, content_type=content_type
    )  # fmt: skip
    deadline = Deadline(timeout_s)
    endpoint = Endpoint(address.scheme, address.host, address.port)
    connection: EtcdConnection | None = None
    answer = bytearray()
    try:
        connection = EtcdConnection(endpoint, context if address.scheme == "https" else None, deadline)
        connection.send(exchange.request, deadline)
        while not exchange.is_complete and len(answer) <= _MAX_ANSWER_BYTES:
            data = connection.receive(deadline.remaining_s())
            if not data:
                exchange.end()
                break
            answer += exchange.feed(data)
    except (OSError, InvalidResponseError) as error:
        # the cause's text may hold secrets
        raise DeliveryError(f"{address}: {attempt_failure(error, timeout_s)}") from None
    finally:
        if connection is not None:
            connection.close()
    text = answer_text(answer[:_MAX_ANSWER_BYTES].decode(errors="replace"), (*secrets, bearer, address.target))
    if 200 <= exchange.status < 300:
        return f"{exchange.status} {text}".rstrip()
    raise DeliveryError(
        f"{address} answers {exchange.status}{_redirect_text(exchange.status)}{f': {text}' if text else ''}",
        retry_after_s=_retry_after_s(exchange) if exchange.status in _BUSY else 0.0,
    )


def attempt_failure(error: Exception, timeout_s: float) -> str:
    """Return why an attempt of at most `timeout_s` failed, as a short text."""
    return f"no answer within {timeout_s:.3g} s" if isinstance(error, TimeoutError) else short(failure_text(error))


def answer_text(text: str, secrets: Sequence[str]) -> str:
    """Return a receiver's answer, on one line, without the secrets."""
    for secret in secrets:
        if len(secret) > 1:  # the path of a plain address is one character
            text = text.replace(secret, "(secret)")
    return printable(short(re.sub(r"[^\x20-\x7e]+", " ", text), _MAX_ANSWER_CHARS))


def _redirect_text(status: int) -> str:
    return ", a redirect, which is not followed" if 300 <= status < 400 else ""


def _retry_after_s(exchange: HttpExchange) -> float:
    """Return the wait in seconds that a receiver asks for; its header has a number or a date."""
    raw = next((value for name, value in exchange.headers if name == b"retry-after"), b"").decode("ascii", "replace")
    if re.fullmatch(r"[0-9]{1,9}", raw):
        return min(float(raw), MAX_RETRY_AFTER_S)
    try:
        moment = parsedate_to_datetime(raw)
        left_s = (moment - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # neither a number nor a date, or a date without a time zone
        return 0.0
    return min(max(left_s, 0.0), MAX_RETRY_AFTER_S)


def read_template(path: str, key: str) -> str:
    """Return the text of a webhook's template, which `key` names. Raises: ConfigError."""
    most_bytes = 64 << 10
    try:
        with Path(path).open("rb") as file:
            raw = file.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise ValueError(f"it has more than {most_bytes:,} bytes")
        return raw.decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"{key} cannot be used: {reason}; name a text file"]) from error
