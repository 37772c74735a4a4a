"""Changes of a run's configuration, <run>/diagnosis/config-changes.jsonl: a line for each round with another one.

The rank that reports writes it, beside <run>/config.toml, when its round has loaded: it holds the run, so nobody else
writes at the same time. It is written before config.toml: a crash between the two tells of a change twice, never of
none. Appended and never changed; a line that a crash cut short is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.line_files import append_line, read_lines
from megatrain.contracts.record import decode, encode

CHANGES_NAME = "config-changes.jsonl"
_MOST_BYTES = 16 << 20
_MOST_KEYS = 1000
_MOST_CHARACTERS = 300
"""Of a value that is shown: lists of data files may be longer."""


@dataclass(frozen=True, slots=True)
class ChangedKey:
    """A key, as "optimizer.lr", and its values as TOML; empty: the configuration does not have it."""

    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A round that began with another configuration than the one before it."""

    round: int
    first_step: int
    """That the round trains."""
    at_unix_s: float
    keys: tuple[ChangedKey, ...]


def changed_keys(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[ChangedKey, ...]:
    """Return the keys whose values differ, by name. Pure. Both: section.key -> value as text."""
    differing = [key for key in sorted({*before, *after}) if before.get(key, "") != after.get(key, "")]
    return tuple(ChangedKey(key, _cut(before.get(key, "")), _cut(after.get(key, ""))) for key in differing[:_MOST_KEYS])


def append_change(path: Path, change: ConfigChange) -> None:
    """Append a line, durable when this returns. Raises: OSError."""
    append_line(path, encode(change))


def read_changes(path: Path) -> tuple[ConfigChange, ...]:
    """Return the changes that can be read, in their order; none where there is no file. Raises: OSError."""
    found = []
    for line in read_lines(path, _MOST_BYTES):
        try:
            found.append(decode(ConfigChange, line, str(path)))
        except CoordinationError:
            continue
    return tuple(found)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
