"""Applies watch events to the state. Pure functions: no I/O and no clock.

An unreadable value does not stop the driver: it is left out of the state and listed in `damaged`. A time that a host
reports is used if it is plausible by this driver's clock; otherwise the time at which it arrived is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_records import CheckReport, HangEvidence, HostRecord, HostStatus, RankFailure
from megatrain.contracts.records.host_verdict import HostVerdict, VerdictOutcome
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.job_keys import key_number
from megatrain.contracts.records.job_requests import Answer, JobRequest
from megatrain.contracts.records.notices import ReceiverRecord
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Cordon, Halt, HostCommand, JobEnd, JobRecord, Round, RoundDeadlines
from megatrain_job.coordination.watch_event import ChangeKind, Changes, Snapshot, WatchEvent
from megatrain_job.coordination.wire import KeyValue
from megatrain_launcher.driver.state import ClusterState, Departed, Seen

_KEPT_FAILURE_ROUNDS = 2
_MAX_REPORT_DELAY_S = 60.0
"""Maximum plausible delay of a failure report: etcd may have been down, or a driver had to be elected."""
_ELECTION = "driver"


def _text(parts: tuple[str, ...]) -> Any:
    (name,) = parts
    return name


def _number(parts: tuple[str, ...]) -> Any:
    (text,) = parts
    number = key_number(text)
    if number is None:
        raise ValueError(f"{text!r} is not the number of a key")
    return number


def _number_and_host(parts: tuple[str, ...]) -> Any:
    text, host = parts
    return _number((text,)), host


def _pair(parts: tuple[str, ...]) -> Any:
    first, second = parts
    return first, second


@dataclass(frozen=True, slots=True)
class _Table:
    """How the keys of one directory become entries of a mapping of the state."""

    name: str
    """The attribute of the state."""
    record_type: type[Any]
    entry_of: Callable[[tuple[str, ...]], Any]
    """Returns the index of an entry from the parts of its key after the directory."""
    own_names: tuple[str, ...] = ()
    """The fields of a record that repeat its key. A mismatch is an error, because an answer or halt would be written to
    the wrong key."""


_TABLES: Mapping[str, _Table] = {
    "hosts": _Table("hosts", HostRecord, _text, ("host",)),
    "status": _Table("statuses", HostStatus, _text, ("host",)),
    "rounds": _Table("rounds", Round, _number, ("number",)),
    "halts": _Table("halts", Halt, _number, ("number",)),
    "deadlines": _Table("deadlines", RoundDeadlines, _number, ("number",)),
    "evidence": _Table("evidence", HangEvidence, _number_and_host, ("round", "host")),
    "commands": _Table("commands", HostCommand, _number, ("number",)),
    "requests": _Table("requests", JobRequest, _text, ("request_id",)),
    "answers": _Table("answers", Answer, _text, ("request_id",)),
    "checks": _Table("checks", CheckReport, _pair),
    "cordons": _Table("cordons", Cordon, _text, ("host",)),
    "incidents": _Table("incidents", Incident, _text, ("incident_id",)),
    "verdicts": _Table("verdicts", HostVerdict, _text, ("verdict_id",)),
    "outcomes": _Table("outcomes", VerdictOutcome, _text, ("verdict_id",)),
    "notices": _Table("receivers", ReceiverRecord, _text, ("receiver",)),
}
"""By the first part of a key."""
_SINGLE: Mapping[str, type[Any]] = {"job": JobRecord, "end": JobEnd}


def fold(state: ClusterState, events: Iterable[WatchEvent], now: float) -> ClusterState:
    """Return the state after events that arrived at `now`. Each changed table is copied only once."""
    draft = _Draft(state, now)
    for event in events:
        draft.take(event)
    return draft.finish()


def plausible_time(host_time: float, first_seen: float, now: float) -> float:
    """Return `host_time` if it is between `first_seen` - _MAX_REPORT_DELAY_S and `now`, else `first_seen`."""
    return host_time if first_seen - _MAX_REPORT_DELAY_S <= host_time <= now else first_seen


def _name(key: bytes) -> str:
    return key.decode(errors="replace")


class _Draft:
    """A state under construction. Copies a table before the first write to it."""

    def __init__(self, state: ClusterState, now: float) -> None:
        self._state = state
        self._now = now
        self._revision = state.revision
        self._changed: dict[str, Any] = {}

    def finish(self) -> ClusterState:
        return replace(self._state, revision=self._revision, **self._changed)

    def take(self, event: WatchEvent) -> None:
        match event:
            case Snapshot(revision=revision, items=items):
                present = {_name(item.key) for item in items}
                for key in [key for key in self._table("seen") if key not in present]:
                    self.delete(key)
                for item in items:
                    self.put(item)
                self._revision = revision
            case Changes(revision=revision, changes=changes):
                for change in changes:
                    if change.kind is ChangeKind.PUT:
                        self.put(change.item)
                    else:
                        self.delete(_name(change.item.key))
                self._revision = max(self._revision, revision)

    def _table(self, name: str) -> dict[Any, Any]:
        if name not in self._changed:
            self._changed[name] = dict(getattr(self._state, name))
        table: dict[Any, Any] = self._changed[name]
        return table

    def put(self, item: KeyValue) -> None:
        key = _name(item.key)
        before: Seen | None = self._table("seen").get(key)
        if before is not None and before.mod_revision == item.mod_revision:
            return
        was_not_recreated = before is not None and before.create_revision == item.create_revision
        since = before.since if before is not None and was_not_recreated else self._now
        self._table("seen")[key] = Seen(item.create_revision, item.mod_revision, since, self._now)
        kind, *rest = self._state.keys.parts(key) or ("",)
        try:
            if kind == _ELECTION and not item.lease_id:
                raise CoordinationError(f"{key}: this election key has no lease, so it is not a candidacy")
            if kind in _SINGLE and not rest:
                self._changed[kind] = decode(_SINGLE[kind], item.value, key)
            elif kind in _TABLES:
                self._enter(kind, tuple(rest), item.value, key)
        except (CoordinationError, ValueError) as error:
            # the previous value is no longer valid either
            self._drop(kind, tuple(rest))
            self._table("damaged")[key] = str(error)
        else:
            if key in self._table("damaged"):
                del self._table("damaged")[key]

    def delete(self, key: str) -> None:
        self._table("seen").pop(key, None)
        self._table("damaged").pop(key, None)
        kind, *rest = self._state.keys.parts(key) or ("",)
        if kind in _SINGLE and not rest:
            self._changed[kind] = None
        elif kind != "status":  # the last status of a host that is gone is still needed
            self._drop(kind, tuple(rest))

    def _enter(self, kind: str, rest: tuple[str, ...], value: bytes, key: str) -> None:
        columns = _TABLES[kind]
        entry = columns.entry_of(rest)
        record = decode(columns.record_type, value, key)
        own = tuple(getattr(record, name) for name in columns.own_names)
        if own and own != (entry if isinstance(entry, tuple) else (entry,)):
            found = ", ".join(f"{part}={value!r}" for part, value in zip(columns.own_names, own, strict=True))
            raise CoordinationError(f"{key}: {found}; expected {entry!r}")
        table = self._table(columns.name)
        before = table.get(entry)
        if isinstance(record, HostRecord):
            if before is not None and before.session != record.session:
                self._table("departed")[entry] = Departed(before, self._now)
            elif before is None:
                self._forget_departure(record)
        elif isinstance(record, HostStatus):
            self._record_progress(record, before)
        table[entry] = record

    def _drop(self, kind: str, rest: tuple[str, ...]) -> None:
        if kind not in _TABLES or kind == "deadlines":  # hosts may still use the earlier deadlines
            return
        try:
            entry = _TABLES[kind].entry_of(rest)
        except ValueError:
            return
        record = self._table(_TABLES[kind].name).pop(entry, None)
        if isinstance(record, HostRecord):
            self._table("departed")[entry] = Departed(record, self._now)

    def _forget_departure(self, record: HostRecord) -> None:
        """Remove the departure and the probe result of a session that is registered again."""
        left = self._table("departed").get(record.host)
        if left is not None and left.record.session == record.session:
            del self._table("departed")[record.host]
            self._table("probes").pop(record.host, None)

    def _record_progress(self, status: HostStatus, before: HostStatus | None) -> None:
        host = status.host
        is_same = before is not None and (before.session, before.round) == (status.session, status.round)
        if status.stall is None:
            self._table("stalled_since").pop(host, None)
        elif before is None or before.stall is None or not is_same:
            self._table("stalled_since")[host] = self._now
        steps_before = before.min_step if before is not None and is_same else None
        if status.min_step is not None and (steps_before is None or status.min_step > steps_before):
            self._table("advanced_at")[host] = self._now
        if status.failures:
            self._record_failures(status)

    def _record_failures(self, status: HostStatus) -> None:
        rounds = self._table("failures")
        ranks: dict[int, RankFailure] = dict(rounds.get(status.round, {}))
        for failure in status.failures:
            known = ranks.get(failure.rank)
            # a later failure with a label is more specific than an earlier failure without a label
            if known is None or failure.label or not known.label:
                at = plausible_time(failure.at_unix_s, self._now, self._now) if known is None else known.at_unix_s
                ranks[failure.rank] = replace(failure, at_unix_s=at)
        rounds[status.round] = ranks
        for number in sorted(rounds)[:-_KEPT_FAILURE_ROUNDS]:
            del rounds[number]
