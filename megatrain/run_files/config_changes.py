"""Changes of a run's configuration, <run>/diagnosis/config-changes.jsonl: one line per round that changed it.

The reporting rank writes it, in addition to <run>/config.toml, when its round has loaded. That rank holds the run's
lock, so no other process writes at the same time. The line is written before config.toml: after a crash between the two
writes, a change is recorded twice, but never lost. Lines are appended and never changed. Readers skip a line that a
crash cut short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.line_files import append_line, read_lines
from megatrain.contracts.records.record import decode, encode

CHANGES_NAME = "config-changes.jsonl"
_MAX_BYTES = 16 << 20
_MAX_KEYS = 1000
_MAX_CHARACTERS = 300
"""Longer values are cut: lists of data files may be long."""


@dataclass(frozen=True, slots=True)
class ChangedKey:
    """A key, such as "optimizer.lr", and its values as TOML; "" when a configuration lacks the key."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A change of the configuration between a round and the one before."""

    round: int
    first_step: int
    """The first step that the round trains."""
    at_unix_s: float
    keys: tuple[ChangedKey, ...]


def changed_keys(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[ChangedKey, ...]:
    """Return the keys with different values, by name. `before` and `after` map section.key to the value as text."""
    differing = [key for key in sorted({*before, *after}) if before.get(key, "") != after.get(key, "")]
    return tuple(ChangedKey(key, _cut(before.get(key, "")), _cut(after.get(key, ""))) for key in differing[:_MAX_KEYS])


def append_change(path: Path, change: ConfigChange) -> None:
    """Append a line, durable when this returns. Raises: OSError."""
    append_line(path, encode(change))


def read_changes(path: Path) -> tuple[ConfigChange, ...]:
    """Return the readable changes in order; empty without a file. Raises: OSError."""
    found = []
    for line in read_lines(path, _MAX_BYTES):
        try:
            found.append(decode(ConfigChange, line, str(path)))
        except CoordinationError:
            continue
    return tuple(found)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}..."
