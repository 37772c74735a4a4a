"""Sequence numbers of collectives that NCCL's watchdog prints: the collectives that a rank entered, ended, and waited
for without success."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

MAX_GROUPS: Final = 64

_GROUP = re.compile(r"PG (?:ID |GUID )?(\d+)")
_TIMED_OUT = re.compile(r"SeqNum=(\d+)")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)", re.IGNORECASE)
_COMPLETED = re.compile(r"last completed (?:NCCL )?work: (-?\d+)", re.IGNORECASE)


@dataclass(slots=True)
class WatchdogSequences:
    """The newest numbers by process group, as one rank's log names them."""

    timed_out: dict[str, int] = field(default_factory=dict)
    enqueued: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)

    def see(self, line: str) -> None:
        """Process a line of the watchdog."""
        found = _GROUP.search(line)
        group = found[1] if found else ""
        for numbers, pattern in (
            (self.timed_out, _TIMED_OUT),
            (self.enqueued, _ENQUEUED),
            (self.completed, _COMPLETED),
        ):
            number = pattern.search(line)
            if number is not None and (group in numbers or len(numbers) < MAX_GROUPS):
                numbers[group] = int(number[1])
