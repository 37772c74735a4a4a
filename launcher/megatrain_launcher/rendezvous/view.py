"""One agent's view of the job: an immutable value with the result of all watch events on the job's keys.

A key with an invalid record does not stop the agents: it is left out of the view and listed in `damaged`. An unreadable
halt still halts its round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_records import HostPhase, HostRecord, HostStatus
from megatrain.contracts.records.job_keys import JobKeys, key_number
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Halt, Round
from megatrain_job.coordination.watch_event import Change, ChangeKind, Changes, Snapshot, WatchEvent

_KINDS: dict[str, tuple[str, type[Any]]] = {
    "hosts": ("records", HostRecord),
    "status": ("statuses", HostStatus),
    "rounds": ("rounds", Round),
    "halts": ("halts", Halt),
}
"""By directory of the job's keys: the field of the view, and the record's class."""


@dataclass(frozen=True, slots=True)
class View:
    """The job at a revision. `rounds` and `halts` are by number.

    `since`: by host, the revision of its registration (a revision, because clocks of hosts differ). `damaged`: by key,
    the error because of which the key is left out.
    """

    revision: int = 0
    records: Mapping[str, HostRecord] = field(default_factory=dict)
    statuses: Mapping[str, HostStatus] = field(default_factory=dict)
    rounds: Mapping[int, Round] = field(default_factory=dict)
    halts: Mapping[int, Halt] = field(default_factory=dict)
    since: Mapping[str, int] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def newest_number(self) -> int:
        """The highest number of a round or a halt; 0 if there is none."""
        return max([0, *self.rounds, *self.halts])

    @property
    def next_number(self) -> int:
        """The number of the next round; an unreadable round does not block it."""
        damaged = {key_number(key.rpartition("/")[2]) for key in self.damaged if "/rounds/" in key}
        number = self.newest_number + 1
        while number in damaged:
            number += 1
        return number

    @property
    def newest_round(self) -> Round | None:
        return self.rounds[max(self.rounds)] if self.rounds else None

    @property
    def live_round(self) -> Round | None:
        """The round that is not over, of which there is at most one; None if there is none."""
        newest = self.newest_round
        return newest if newest is not None and not self.is_over(newest.number) else None

    def is_over(self, number: int) -> bool:
        """Return whether a round is halted, or replaced by a newer one."""
        return number in self.halts or self.newest_number > number

    def is_present(self, host: str, session: str) -> bool:
        """Return whether this session of the host is registered."""
        record = self.records.get(host)
        return record is not None and record.session == session

    def is_waiting(self, host: str) -> bool:
        """Return whether a registered host waits for a round."""
        record, status = self.records.get(host), self.statuses.get(host)
        return (
            record is not None
            and status is not None
            and status.session == record.session
            and status.phase is HostPhase.PARKED
        )

    def after(self, event: WatchEvent, keys: JobKeys) -> View:
        """Return the view after an event. An event that the view already contains changes nothing."""
        match event:
            case Snapshot(revision=revision, items=items):
                changes = tuple(Change(ChangeKind.PUT, item) for item in items)
                return View(revision)._changed(revision, changes, keys)
            case Changes(revision=revision, changes=changes):
                return self._changed(revision, changes, keys) if revision > self.revision else self

    def _changed(self, revision: int, changes: tuple[Change, ...], keys: JobKeys) -> View:
        fields: dict[str, dict[Any, Any]] = {}

        def table(name: str) -> dict[Any, Any]:
            if name not in fields:
                fields[name] = dict(getattr(self, name))
            return fields[name]

        for change in changes:
            key = change.item.key.decode("utf-8", "backslashreplace")
            parts = keys.parts(key)
            if len(parts) != 2 or parts[0] not in _KINDS:
                continue
            name, kind = _KINDS[parts[0]]
            index: Any = key_number(parts[1]) if name in ("rounds", "halts") else parts[1]
            table(name).pop(index, None)
            table("damaged").pop(key, None)
            if name == "records":
                table("since").pop(index, None)
            if change.kind is ChangeKind.DELETE:
                continue
            try:
                if index is None:
                    raise CoordinationError(f"{key}: not the number of a round")
                table(name)[index] = decode(kind, change.item.value, key)
            except CoordinationError as error:
                table("damaged")[key] = str(error)
                if name == "halts" and index is not None:  # its key exists, so no agent can write another halt
                    table(name)[index] = Halt(index, str(error), is_saving=False, created_unix_s=0.0)
            else:
                if name == "records":
                    table("since")[index] = change.item.create_revision
        return replace(self, revision=revision, **fields)
