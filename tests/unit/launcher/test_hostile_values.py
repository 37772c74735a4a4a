"""Hostile values under a job's keys: driver, executors and command line survive them, and obey none.

Records of every kind are generated from their type hints, with extreme values that the codec accepts: invalid names,
halves of surrogate pairs, terminal escapes, huge numbers, keys that contradict their value.
"""

from __future__ import annotations

import json
import random
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from megatrain.contracts.errors import CoordinationRefusedError
from megatrain.contracts.records.host_records import CheckReport, HangEvidence, HostRecord, HostStatus
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import Answer, JobRequest, RequestKind
from megatrain.contracts.records.problem_reports import DriverReport
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import Cordon, Halt, HostCommand, JobEnd, JobRecord, Round
from megatrain.formatting import printable
from megatrain_job.coordination.operation_responses import RangeResponse
from megatrain_job.coordination.watch_event import Change, ChangeKind, Changes, Snapshot
from megatrain_job.coordination.wire import KeyRange, KeyValue, Put, Range, as_bytes
from megatrain_job.jobs.assessment import assess
from megatrain_job.jobs.documents import host_document, incident_document, status_document
from megatrain_job.jobs.host_view import host_views
from megatrain_job.jobs.snapshot import read_job
from megatrain_launcher.commands.incident_text import incident_lines, incidents_lines
from megatrain_launcher.commands.status_text import host_lines, status_lines
from megatrain_launcher.driver.decide import decide
from megatrain_launcher.driver.folding import fold
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.writes import trims_of, writes_of
from megatrain_launcher.executor.order_state import OrderState

KEYS = JobKeys("j")
ALL = KeyRange.prefix(KEYS.prefix)
NOW_S = 1.7e9
POLICY = Policy(min_hosts=1, max_hosts=2, num_workers=1, feasible_counts={1: 2, 2: 1})

_KINDS: Mapping[str, tuple[type[Any], tuple[str, ...]]] = {
    "hosts": (HostRecord, ("host",)),
    "status": (HostStatus, ("host",)),
    "rounds": (Round, ("number",)),
    "halts": (Halt, ("number",)),
    "evidence": (HangEvidence, ("round", "host")),
    "commands": (HostCommand, ("number",)),
    "requests": (JobRequest, ("request_id",)),
    "answers": (Answer, ("request_id",)),
    "checks": (CheckReport, ("host", "session")),
    "cordons": (Cordon, ("host",)),
    "incidents": (Incident, ("incident_id",)),
    "job": (JobRecord, ()),
    "end": (JobEnd, ()),
    "report": (DriverReport, ()),
}
"""Record class, and the fields that form its key."""
_TEXTS = ("", "host-1", "host-2", "s1", "s2", "\xb2", "\x1b[31mX", "y" * 300, "\ud800", "a/b", "9" * 30, "restart",
          "evict", "user_code", "127.0.0.1", "request", "exit_code", "ff", "-1")  # fmt: skip
_INTEGERS = (0, 1, 2, 3, -1, 2**62, -(2**62), 100_000, 65_536, 75)
_NUMBERS = (0.0, 1.0, -1.0, 9e18, -9e18, 1e9, NOW_S, 1e-300)
_OTHER_NAMES = ("host-1", "\xb2", "00000001", "00000002", "+5", "a b", "1_0", "9" * 23, "9" * 5000, "1/host-1/x")
_NO_RECORDS = (b"", b"null", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema_version":1e999}', b"1" * 5000)


class Scribe:
    """Writes hostile records, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._revision = 0

    def item(self) -> KeyValue:
        self._revision += 1
        kind = self.random.choice((*_KINDS, "hosts", "status", "rounds"))
        record_class, names = _KINDS[kind]
        value = {**self._record(record_class), "schema_version": 1}
        self._make_plausible(kind, value)
        parts = [f"{value[name]:08d}" if isinstance(value[name], int) else value[name] for name in names]
        if names and self._is(0.2):
            parts = [self.random.choice(_OTHER_NAMES)]
        key = "/".join([f"{KEYS.prefix}{kind}", *parts]).encode(errors="replace")
        raw = self.random.choice(_NO_RECORDS) if self._is(0.05) else json.dumps(value).encode()
        return KeyValue(key, raw, self._revision, self._revision, 0)

    def _make_plausible(self, kind: str, value: dict[str, Any]) -> None:
        """Let some fields agree, so that the record passes the first checks."""
        if kind in ("hosts", "status") and self._is(0.8):
            number = self.random.choice("12")
            value |= {"host": f"host-{number}", "session": f"s{number}"}
        if kind in ("rounds", "halts") and self._is(0.8):
            value["number"] = self.random.choice((1, 2, 3))
        if kind == "rounds" and self._is(0.7):
            value["world_size"] = 2
            value["hosts"] = [
                {"host": f"host-{rank + 1}", "session": f"s{rank + 1}", "address": self.random.choice(_TEXTS),
                 "first_rank": rank, "num_workers": 1, "liveness_port": self.random.choice((0, 1, 70_000))}
                for rank in range(2)
            ]  # fmt: skip

    def _record(self, kind: type[Any]) -> dict[str, Any]:
        hints = get_type_hints(kind)
        needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
        return {name: self._value(hint) for name, hint in hints.items() if name in needed or self._is(0.7)}

    def _value(self, hint: Any) -> Any:
        origin = get_origin(hint)
        if origin in (Union, types.UnionType):
            return None if self._is(0.4) else self._value(get_args(hint)[0])
        if origin is tuple:
            return [self._value(get_args(hint)[0]) for _ in range(self.random.choice((0, 0, 1, 2, 3)))]
        if origin is not None and issubclass(origin, Mapping):
            return {self._value(str): self._value(get_args(hint)[1]) for _ in range(self.random.choice((0, 1, 3)))}
        if is_dataclass(hint):
            record_class: Any = hint
            return self._record(record_class)
        if issubclass(hint, StrEnum):
            return str(self.random.choice(list(hint)))
        return self.random.choice({str: _TEXTS, int: _INTEGERS, float: _NUMBERS, bool: (True, False)}[hint])

    def items(self) -> tuple[KeyValue, ...]:
        found = [self.item() for _ in range(self.random.choice((1, 3, 8, 20)))]
        return tuple({item.key: item for item in found}.values())

    def changes(self, revision: int) -> Changes:
        kind = ChangeKind.PUT if self._is(0.8) else ChangeKind.DELETE
        return Changes(revision, tuple(Change(kind, self.item()) for _ in range(2)))

    def _is(self, chance: float) -> bool:
        return self.random.random() < chance


def with_many_scribes(act: Callable[[Scribe], None]) -> Callable[[], None]:
    """Return a test that runs `act` with many scribes; a failure names the seed."""

    def test() -> None:
        for seed in range(60):
            try:
                act(Scribe(seed))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise

    return test


@pytest.mark.slow
@with_many_scribes
def test_the_driver_decides_for_any_keys(scribe: Scribe) -> None:
    now = NOW_S
    state = fold(ClusterState(KEYS, "host-1", now), (Snapshot(100, scribe.items(), "asked"),), now)
    for revision in range(101, 106):
        writes = writes_of(decide(now, state, POLICY).actions, KEYS, answer_lease_id=1)
        puts = [as_bytes(operation.key) for operation in writes.operations if isinstance(operation, Put)]
        assert len(set(puts)) == len(puts), "etcd refuses a transaction that puts a key twice"
        trimmed = [as_bytes(trim.keys.start) for trim in trims_of(KEYS, state.seen)]
        assert all(key.startswith(KEYS.prefix.encode()) for key in (*puts, *trimmed)), "only keys of the job"
        now += scribe.random.choice((0.1, 5.0, 700.0))
        state = fold(state, (scribe.changes(revision),), now)


class _Etcd:
    """Answers a read of several ranges from a few items. Its alarms are for root only, and no client here is root."""

    def __init__(self, items: tuple[KeyValue, ...]) -> None:
        self.items = items
        self.gateway = self

    def call(self, *_: Any, **__: Any) -> None:
        raise CoordinationRefusedError("permission denied")

    def read_together(self, requests: Iterable[Range], **_: Any) -> list[RangeResponse]:
        found = [tuple(item for item in self.items if item.key in request.keys) for request in requests]
        return [RangeResponse(100, items, has_more=False) for items in found]


@with_many_scribes
def test_the_command_line_shows_any_record(scribe: Scribe) -> None:
    election = KeyValue(f"{KEYS.election}/1".encode(), b"\xff\x1b[31m", 1, 1, 1)
    client: Any = _Etcd((*scribe.items(), election))
    snapshot = read_job(client, KEYS)
    answer = assess(snapshot, NOW_S)
    views = host_views(snapshot)
    texts = [*status_lines(snapshot, answer, NOW_S, is_all=True), *host_lines(views, NOW_S)]
    documents = [status_document(snapshot, answer, NOW_S), *map(host_document, views)]
    texts += incidents_lines("j", snapshot.incidents, NOW_S)
    for incident in snapshot.incidents:
        texts += incident_lines(incident, NOW_S)
        documents.append(incident_document(incident))
    json.dumps(documents, allow_nan=False)
    assert b"\x1b" not in printable("\n".join(texts)).encode()


@with_many_scribes
def test_a_host_reads_its_orders_among_other_keys(scribe: Scribe) -> None:
    items, orders = scribe.items(), OrderState(KEYS, "host-1", "s1")
    orders.take(Snapshot(1, items, "asked"), ALL)
    orders.take(Changes(2, tuple(Change(ChangeKind.DELETE, item) for item in items)), ALL)
    orders.take(Changes(3, (Change(ChangeKind.PUT, _item(KEYS.end, JobEnd(7, "over", NOW_S))),)), ALL)
    assert orders.next_assignment(0) is None


def _item(key: str, record: Any) -> KeyValue:
    return KeyValue(key.encode(), encode(record), 1, 1, 0)


def test_request_under_a_foreign_key_is_not_answered() -> None:
    """Its answer would remove another key, and so be given repeatedly."""
    request = JobRequest("b", RequestKind.CHECKPOINT, "ops")
    item = _item(KEYS.request("a"), request)
    state = fold(ClusterState(KEYS, "host-1", NOW_S), (Snapshot(1, (item,), "asked"),), NOW_S)
    assert state.requests == {}
    assert state.damaged == {KEYS.request("a"): "/megatrain/j/requests/a: request_id='b'; expected 'a'"}


def test_round_under_another_number_or_form_of_it_is_ignored() -> None:
    one = Round(1, 0, (), "127.0.0.1", 1, "a test", "d", NOW_S)
    for name in ("\xb2", "9" * 5000, "+1", "1_0", "00000002", "1", "001", "0000000001"):
        item = _item(f"{KEYS.directory('rounds')}{name}", one)
        state = fold(ClusterState(KEYS, "host-1", NOW_S), (Snapshot(1, (item,), "asked"),), NOW_S)
        assert (dict(state.rounds), len(state.damaged)) == ({}, 1), name
        orders = OrderState(KEYS, "host-1", "s1")
        orders.take(Snapshot(1, (item,), "asked"), ALL)
        assert orders.view().newest is None, name
