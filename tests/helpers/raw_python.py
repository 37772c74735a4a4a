"""Finds raw Python representations in texts for people: Stall(phase='step'), gain_s_per_step=0, exit code -9."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_OBJECT = re.compile(r"\b[A-Z][A-Za-z]+\(\w+=")
_FIELD = re.compile(r"(?<![\w.\-?&])[a-z]\w*_\w+=")
"""Except keys of the configuration (recovery.restarts_per_hour=3), options and links, which are written like that."""
_CODE = re.compile(r"\b(?:with|code) -\d+\b")
"""A signal in the form of subprocess's exit codes."""
_AS_WRITTEN = frozenset({"line", "lines", "frames", "run_directory", "place", "address"})
"""Output of ranks, stacks, and paths."""


def raw_python(text: str) -> list[str]:
    """Return the raw parts of a text."""
    return _OBJECT.findall(text) + _FIELD.findall(text) + _CODE.findall(text)


def raw_texts(answer: Any, place: str = "") -> Iterator[str]:
    """Yield "place: text" for each text in a JSON answer of the API that has a raw part."""
    match answer:
        case dict():
            for name, value in answer.items():
                if not (name in _AS_WRITTEN and isinstance(value, str | list) and not _holds_documents(value)):
                    yield from raw_texts(value, f"{place}.{name}")
        case list():
            for number, value in enumerate(answer):
                yield from raw_texts(value, f"{place}[{number}]")
        case str() if raw_python(answer):
            yield f"{place}: {answer}"


def _holds_documents(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(one, dict) for one in value)
