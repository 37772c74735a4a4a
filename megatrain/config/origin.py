"""The source of a key's value: a line of a file, a program, the command line, or the default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """Where a value was set: the path of a file and the number of a line in it, or a description. Line 0: no line."""

    place: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.place}:{self.line}" if self.line else self.place


DEFAULT = ValueOrigin("default")
