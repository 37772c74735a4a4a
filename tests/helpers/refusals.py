"""The message of an expected error, for tests that check many refused values in one table."""

from __future__ import annotations

from collections.abc import Callable


def refusal(kind: type[Exception], call: Callable[..., object], *arguments: object, **named: object) -> str:
    """Return the message of the error of `kind` that a call raises; "" if the call succeeds."""
    try:
        call(*arguments, **named)
    except kind as error:
        return str(error)
    return ""
