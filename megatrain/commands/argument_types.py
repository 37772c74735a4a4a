"""Types of arguments, and arguments of all subcommands. Each error names the expected form and the value found."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_LARGEST = 2**63 - 1
_SHOWN_CHARACTERS = 40


def whole_number(minimum: int, maximum: int = _LARGEST) -> Callable[[str], int]:
    """Return a parser of integers from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        number = _integer(text)
        if number is not None and minimum <= number <= maximum:
            return number
        is_limit_stated = maximum != _LARGEST or (number is not None and number > maximum)
        limit = f"from {minimum} to {maximum}" if is_limit_stated else f"of at least {minimum}"
        raise _refusal(text, f"a whole number {limit}")

    return parse


def real_number(wanted: str, is_allowed: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of the numbers that `is_allowed` accepts; `wanted` describes them in an error."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")  # NaN, which every comparison rejects
        if not is_allowed(value):
            raise _refusal(text, wanted)
        return value

    return parse


def seed(text: str) -> int:
    """Return a seed: an integer that fits into 64 bits, signed or unsigned."""
    value = _integer(text)
    if value is None or not -(2**63) <= value < 2**64:
        raise _refusal(text, "an integer of 64 bits")
    return value


def utf8_text(text: str) -> str:
    """Return `text`; raise if the command line was not UTF-8. Python represents such bytes by lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        byte = f"byte 0x{ord(found) - 0xDC00:02x}" if "\udc80" <= found <= "\udcff" else f"U+{ord(found):04X}"
        raise argparse.ArgumentTypeError(f"holds {byte} after {error.start} characters, which is not UTF-8") from None
    return text


def utf8_path(text: str) -> Path:
    """Return a path that a configuration can store: UTF-8 text."""
    return Path(utf8_text(text))


def spellings(option: str) -> list[str]:
    """Return the spellings that torchrun accepts for an option: with hyphens and with underscores."""
    name = option.removeprefix("--")
    return list(dict.fromkeys([option, "--" + name.replace("-", "_")]))


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:  # also raised for more than 4300 digits
        return None


def _refusal(text: str, wanted: str) -> argparse.ArgumentTypeError:
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return argparse.ArgumentTypeError(f"{shown!r} is not {wanted}")


def add_json(parser: argparse._ActionsContainer) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", dest="is_json", help="print one JSON object")
