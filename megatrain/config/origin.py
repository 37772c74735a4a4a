"""The source of a key's value: a line of a file, a program, the command line, or the default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """A value written in a file. Line 0 stands for the file as a whole."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True, slots=True)
class ProgramOrigin:
    """A value that a program passed."""

    def __str__(self) -> str:
        return "given by the program"


@dataclass(frozen=True, slots=True)
class OverrideOrigin:
    """A value given as --section.key=value."""

    key: str

    def __str__(self) -> str:
        return f"--{self.key} on the command line"


@dataclass(frozen=True, slots=True)
class DefaultOrigin:
    """A value that was not set."""

    def __str__(self) -> str:
        return "default"


Origin = FileOrigin | ProgramOrigin | OverrideOrigin | DefaultOrigin
