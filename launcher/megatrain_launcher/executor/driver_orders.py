"""The orders that etcd has: the driver's rounds, halts, deadlines and commands, the end of the job, and what to record.

An unreadable value is logged and skipped: it changes nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.job_keys import JobKeys, key_number
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Halt, HostCommand, JobEnd, Round, RoundDeadlines
from megatrain_job.coordination.watch_event import Change, ChangeKind, Changes, Snapshot, WatchEvent
from megatrain_job.coordination.wire import KeyRange, KeyValue

_logger = logging.getLogger(__name__)


class DriverOrders:
    """The orders after all applied events. Not thread-safe."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self.rounds: dict[int, Round] = {}
        self.halts: dict[int, Halt] = {}
        self.deadlines: dict[int, RoundDeadlines] = {}
        self.commands: dict[int, HostCommand] = {}
        self.end: JobEnd | None = None
        self.diag_settings: DiagSettings | None = None
        self._numbered: dict[str, tuple[type[Any], dict[int, Any]]] = {
            "rounds": (Round, self.rounds),
            "halts": (Halt, self.halts),
            "deadlines": (RoundDeadlines, self.deadlines),
            "commands": (HostCommand, self.commands),
        }
        """By directory whose keys are numbers: the class of its records, and the records by number."""

    @property
    def key_ranges(self) -> list[KeyRange]:
        """The keys to watch: `rounds/`, `halts/`, and a range with `commands/`, `deadlines/`, `diag/` and `end`.

        `apply` ignores the other keys of this range, such as cordons.
        """
        directory = self._keys.directory
        rest = KeyRange(directory("commands").encode(), directory("evidence").encode())
        return [KeyRange.prefix(directory("rounds")), KeyRange.prefix(directory("halts")), rest]

    @property
    def newest_round(self) -> Round | None:
        return self.rounds[self.newest_number] if self.rounds else None

    @property
    def newest_number(self) -> int:
        """The number of the newest round; 0 if there is none."""
        return max(self.rounds, default=0)

    def apply(self, event: WatchEvent, keys: KeyRange) -> None:
        """Apply an event of the watch of `keys`."""
        match event:
            case Snapshot(items=items):
                self._forget(keys)
                for item in items:
                    self._put(item)
            case Changes(changes=changes):
                for change in changes:
                    self._change(change)

    def _change(self, change: Change) -> None:
        if change.kind is ChangeKind.PUT:
            self._put(change.item)
            return
        match self._keys.parts(change.item.key.decode(errors="replace")):
            case (name, text) if (number := key_number(text)) is not None and name in self._numbered:
                self._numbered[name][1].pop(number, None)
            case ("end",):
                self.end = None
            case ("diag", "settings"):
                self.diag_settings = None

    def _put(self, item: KeyValue) -> None:
        key = item.key.decode(errors="replace")
        try:
            match self._keys.parts(key):
                case (name, text) if name in self._numbered:
                    record_type, records = self._numbered[name]
                    record = decode(record_type, item.value, key)
                    if record.number != key_number(text):
                        raise CoordinationError(f"{key}: number={record.number}; expected the number in the key")
                    records[record.number] = record
                case ("end",):
                    self.end = decode(JobEnd, item.value, key)
                case ("diag", "settings"):
                    self.diag_settings = decode(DiagSettings, item.value, key)
        except CoordinationError as error:
            _logger.error("an order cannot be read: %s", error)

    def _forget(self, keys: KeyRange) -> None:
        """Remove the orders in the range `keys`, because a snapshot replaces them."""
        for name, (_, records) in self._numbered.items():
            if keys.start <= self._keys.directory(name).encode() < keys.end:
                records.clear()
        if keys.start <= self._keys.end.encode() < keys.end:
            self.end = None
        if keys.start <= self._keys.diag_settings.encode() < keys.end:
            self.diag_settings = None
