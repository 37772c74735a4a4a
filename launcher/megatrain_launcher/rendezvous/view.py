"""What one agent knows of the job: a fold of the watch over its keys. Values only, so that rules about it are pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.contracts.host_records import HostPhase, HostRecord, HostStatus
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import decode
from megatrain.contracts.rounds import Halt, Round
from megatrain.coordination.watch import Change, ChangeKind, Changes, Snapshot, WatchEvent
from megatrain.coordination.wire import KeyValue

_KINDS: dict[str, tuple[str, type[Any]]] = {
    "hosts": ("records", HostRecord),
    "status": ("statuses", HostStatus),
    "rounds": ("rounds", Round),
    "halts": ("halts", Halt),
}
"""Directory of the job -> field of the view, and the record's class."""


@dataclass(frozen=True, slots=True)
class View:
    """The job at a revision. `rounds` and `halts` are by number."""

    revision: int = 0
    records: Mapping[str, HostRecord] = field(default_factory=dict)
    statuses: Mapping[str, HostStatus] = field(default_factory=dict)
    rounds: Mapping[int, Round] = field(default_factory=dict)
    halts: Mapping[int, Halt] = field(default_factory=dict)

    @property
    def newest_number(self) -> int:
        """The highest number that a round or a halt has had; 0: there was none."""
        return max([0, *self.rounds, *self.halts])

    @property
    def newest_round(self) -> Round | None:
        return self.rounds[max(self.rounds)] if self.rounds else None

    @property
    def live_round(self) -> Round | None:
        """The round that is not over; there is at most one."""
        newest = self.newest_round
        return newest if newest is not None and not self.is_over(newest.number) else None

    def is_over(self, number: int) -> bool:
        """Say whether a round is halted, or replaced by a newer one."""
        return number in self.halts or self.newest_number > number

    def is_present(self, host: str, session: str) -> bool:
        """Say whether that life of a host is registered."""
        record = self.records.get(host)
        return record is not None and record.session == session

    def is_waiting(self, host: str) -> bool:
        """Say whether a registered host waits for a round."""
        record, status = self.records.get(host), self.statuses.get(host)
        return (
            record is not None
            and status is not None
            and status.session == record.session
            and status.phase is HostPhase.PARKED
        )

    def after(self, event: WatchEvent, keys: JobKeys) -> View:
        """Return the view after an event; changes that it already contains change nothing.

        Raises: CoordinationError naming a key whose value is no record of ours.
        """
        match event:
            case Snapshot(revision=revision, items=items):
                changes = tuple(Change(ChangeKind.PUT, item) for item in items)
                return View(revision)._changed(revision, changes, keys)
            case Changes(revision=revision, changes=changes):
                return self._changed(revision, changes, keys) if revision > self.revision else self

    def _changed(self, revision: int, changes: tuple[Change, ...], keys: JobKeys) -> View:
        fields: dict[str, dict[Any, Any]] = {}
        for change in changes:
            parts = keys.parts(change.item.key.decode("utf-8", "backslashreplace"))
            if len(parts) != 2 or parts[0] not in _KINDS:
                continue
            name, kind = _KINDS[parts[0]]
            found = fields.setdefault(name, dict(getattr(self, name)))
            index: Any = int(parts[1]) if name in ("rounds", "halts") and parts[1].isdecimal() else parts[1]
            if change.kind is ChangeKind.DELETE:
                found.pop(index, None)
            else:
                found[index] = _read(kind, change.item)
        return replace(self, revision=revision, **fields)


def _read(kind: type[Any], item: KeyValue) -> Any:
    return decode(kind, item.value, item.key.decode("utf-8", "backslashreplace"))
