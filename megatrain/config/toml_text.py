"""Values and settings as TOML, for files and messages."""

from __future__ import annotations

import json
import re

_MAX_CHARACTERS = 60
_MAX_DECIMAL_BITS = 10_000
"""Python writes no integer of more than 4300 decimal digits; in hexadecimal it writes any."""


class TinyNumber(float):
    """A number other than 0 that is too small for a float, whose value is 0.0. `text`: the number as it was written."""

    text: str


def read_float(text: str) -> float:
    """Return the number in a text of TOML: a TinyNumber if a float would round it to 0, so that it can be refused."""
    value = float(text)
    if value or not re.search("[1-9]", text.lower().partition("e")[0]):
        return value
    found = TinyNumber(value)
    found.text = text
    return found


def value_text(value: object) -> str:
    """Return `value` as TOML source."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > _MAX_DECIMAL_BITS:
        return hex(value)
    if isinstance(value, TinyNumber):
        return value.text
    if isinstance(value, str):
        # JSON escapes all characters that TOML requires to be escaped, except DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {value_text(item)}' for key, item in value.items())}}}"
    return str(value)


def setting(key: str, value: object) -> str:
    """Return "key=value" for a message, cut short if the value is long."""
    return f"{key}={shortened(value_text(value))}"


def shortened(text: str) -> str:
    """Return `text`, cut short if it is long."""
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
