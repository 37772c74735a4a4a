"""Which of the driver's commands this host has still to obey, and the number up to which all are obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from megatrain.contracts.rounds import HostCommand


class CommandKind(StrEnum):
    """What the driver may ask of executors. Unknown kinds are ignored: another version may know more."""

    CHECKPOINT = "checkpoint"
    EVIDENCE = "evidence"
    CHECK = "check"
    PAIRS = "pairs"


class CommandDesk:
    """Pure bookkeeping. Commands up to `seen` were given before this executor came and are not its to obey."""

    def __init__(self, seen: int) -> None:
        self._seen = seen
        self._open: dict[int, HostCommand] = {}

    @property
    def seen(self) -> int:
        return self._seen

    @property
    def obeyed(self) -> int:
        """The number up to which every command is obeyed, or did not mean this host."""
        return min(self._open) - 1 if self._open else self._seen

    def take(self, commands: Iterable[HostCommand]) -> list[HostCommand]:
        """Enter commands and return those that are new, in their order."""
        fresh = [command for command in sorted(commands, key=lambda one: one.number) if command.number > self._seen]
        for command in fresh:
            self._seen = command.number
            if command.kind in tuple(CommandKind):
                self._open[command.number] = command
        return fresh

    def settle(self, number: int) -> None:
        """A command is obeyed, or cannot be any more."""
        self._open.pop(number, None)

    def settle_checkpoints(self, up_to: int) -> None:
        """All ranks have obeyed the commands to save up to this number."""
        for number in [one for one, command in self._open.items() if command.kind == CommandKind.CHECKPOINT]:
            if number <= up_to:
                self.settle(number)
