"""Which of the driver's commands this host has yet to obey, and the number up to which all are obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from megatrain.contracts.records.rounds import HostCommand


class CommandKind(StrEnum):
    """What the driver may ask of executors. Unknown kinds are ignored: another version may have more."""

    CHECKPOINT = "checkpoint"
    EVIDENCE = "evidence"
    CHECK = "check"
    PAIRS = "pairs"


class CommandTracker:
    """Tracks which commands are obeyed. Commands up to `seen` predate this executor, which ignores them."""

    def __init__(self, seen: int) -> None:
        self._seen = seen
        self._open: dict[int, HostCommand] = {}

    @property
    def seen(self) -> int:
        return self._seen

    @property
    def obeyed(self) -> int:
        """The number up to which every command is obeyed, or was not for this host."""
        return min(self._open) - 1 if self._open else self._seen

    def take(self, commands: Iterable[HostCommand]) -> list[HostCommand]:
        """Enter commands and return the new ones, in order."""
        fresh = [command for command in sorted(commands, key=lambda one: one.number) if command.number > self._seen]
        for command in fresh:
            self._seen = command.number
            if command.kind in tuple(CommandKind):
                self._open[command.number] = command
        return fresh

    def mark_done(self, number: int) -> None:
        """Note that a command is obeyed, or can no longer be obeyed."""
        self._open.pop(number, None)

    def mark_checkpoints_done(self, up_to: int) -> None:
        """Note that all ranks have obeyed the commands to save up to this number."""
        for number in [one for one, command in self._open.items() if command.kind == CommandKind.CHECKPOINT]:
            if number <= up_to:
                self.mark_done(number)
