"""A running job as stored in etcd, kept current by a thread that reads it when a watch reports a change.

The thread reads at most twice a second, and by default at least every five seconds, unless reads are slow. While etcd
is unavailable, the last state is kept, with its age and the reason; the watch and the client recover by themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_records import CheckReport, HangEvidence
from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.restarting_thread import RestartingThread
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import Changes, WatchEvent
from megatrain_job.coordination.wire import KeyRange, Range
from megatrain_job.jobs.assessment import Unreachable, assess
from megatrain_job.jobs.health import Health, health_of
from megatrain_job.jobs.snapshot import DecodedRecords, JobSnapshot, decode_all, read_job
from megatrain_job.jobs.verdict_cases import VerdictWithOutcome, read_cases

_logger = logging.getLogger(__name__)
MAX_PAUSE_S = 5.0
"""By default, the longest time between two reads while no change is reported."""
_MIN_PAUSE_S = 0.5
_POLL_S = 0.2
_MAX_CHARACTERS = 300
_PAUSE_FACTOR = 4.0
"""The pause after a read is at least this multiple of its duration, because thousands of hosts write all the time. A
failed read only waited and does not count: a long pause would delay the first read after an outage."""
_WATCH_AGAIN_S = 30.0
_ANSWER_S = 0.7
"""etcd must answer within this time, because a page that shows an old state must report that within two seconds."""
_OTHER_DIRECTORIES = frozenset({"verdicts", "outcomes", "checks", "evidence"})
"""Directories of the keys that `read_records` reads."""


@dataclass(frozen=True, slots=True)
class EtcdRecords:
    """Records that the snapshot lacks: all verdicts with their outcomes, check reports, the evidence of a hang."""

    cases: tuple[VerdictWithOutcome, ...] = ()
    checks: dict[str, CheckReport] = field(default_factory=dict)
    evidence: tuple[HangEvidence, ...] = ()
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EtcdPoll:
    """The last state that was read from etcd, and when.

    problem: why no newer state could be read; empty if the last read succeeded.
    """

    snapshot: JobSnapshot | None = None
    records: EtcdRecords = EtcdRecords()
    at_unix_s: float = 0.0
    problem: str = ""

    @property
    def unreachable(self) -> Unreachable | None:
        """The reason why no newer state is known; None while etcd answers."""
        if not self.problem:
            return None
        since_s = None if self.snapshot is None else self.at_unix_s
        return Unreachable(f"etcd is out of reach: {self.problem}", since_s)

    def health(self, now_s: float) -> Health | None:
        """Return the health of the job at a given time, as far as this state shows; None before the first read."""
        if self.snapshot is not None:
            return assess(self.snapshot, now_s, self.unreachable).health
        return None if self.unreachable is None else health_of([self.unreachable.reason])


class EtcdJob:
    """Reads the state of a job, in a separate thread, until `close`."""

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        changed: Callable[[EtcdPoll, EtcdPoll], None],
        *,
        clock: Callable[[], float] = time.time,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        """The thread calls `changed` with the earlier and the new state after each read: at least every `max_pause_s`
        seconds, unless reads are slow.
        """
        settings = client.settings
        self._client, self._keys, self._changed, self._clock = client, keys, changed, clock
        self._max_pause_s = max_pause_s
        self._reader = EtcdClient(replace(settings, attempt_s=min(settings.attempt_s, _ANSWER_S), call_s=_ANSWER_S))
        self._last_poll = EtcdPoll()
        self._decoded = DecodedRecords()
        self._is_stale = self._other_records_changed = True
        self._watch: Watch | None = None
        self._next_watch_s = 0.0
        self._closed = threading.Event()
        self._thread = RestartingThread("job in etcd", self._run, self._closed)

    @property
    def last_poll(self) -> EtcdPoll:
        return self._last_poll

    def close(self) -> None:
        """End the thread, and wait until its current call is over."""
        self._closed.set()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        next_s = 0.0
        try:
            while not self._closed.is_set():
                now_s = time.monotonic()
                if self._is_stale or now_s >= next_s + self._silence_limit_s:
                    self._closed.wait(max(0.0, next_s - now_s))
                    began_s = time.monotonic()
                    self._read()
                    ended_s = time.monotonic()
                    busy_s = 0.0 if self._last_poll.problem else ended_s - began_s
                    next_s = ended_s + max(_MIN_PAUSE_S, _PAUSE_FACTOR * busy_s)
                self._listen(next_s + self._silence_limit_s - time.monotonic())
        finally:
            self._drop_watch()

    @property
    def _silence_limit_s(self) -> float:
        """If no change is reported, the next read waits this much longer than the shortest pause."""
        is_current = self._last_poll.snapshot is not None and not self._last_poll.problem
        return self._max_pause_s - _MIN_PAUSE_S if is_current else _MIN_PAUSE_S

    def _read(self) -> None:
        before, self._is_stale = self._last_poll, False
        try:
            snapshot = read_job(self._reader, self._keys, num_incidents=0, decoded=self._decoded)
            records = before.records
            if self._other_records_changed or before.problem:
                records = read_records(self._reader, self._keys)
                self._other_records_changed = False
            self._last_poll = EtcdPoll(snapshot, records, self._clock())
        except CoordinationError as error:
            self._last_poll = replace(before, problem=str(error).partition("\n")[0])
        except Exception as error:  # noqa: BLE001 -- reported, and tried again
            # a bug: the displayed state must not look current
            self._last_poll = replace(before, problem=f"a bug in this program: {error!r}"[:_MAX_CHARACTERS])
        if self._last_poll.problem and not before.problem:
            _logger.warning(
                "the state of job %s cannot be updated from etcd: %s", self._keys.job, self._last_poll.problem
            )
        self._changed(before, self._last_poll)

    def _listen(self, timeout_s: float) -> None:
        """Wait until the watch reports a change, for at most `timeout_s`."""
        watch = self._watch or self._opened_watch()
        if watch is None:
            self._closed.wait(max(timeout_s, 0.0))
            return
        deadline_s = time.monotonic() + timeout_s
        while not self._closed.is_set() and not self._is_stale and time.monotonic() < deadline_s:
            try:
                event = watch.next(min(_POLL_S, max(0.01, deadline_s - time.monotonic())))
            except CoordinationError as error:
                job = self._keys.job
                _logger.warning("job %s cannot be watched; it is read every %g s: %s", job, self._max_pause_s, error)
                self._drop_watch()
                return
            if event is not None:
                self._take(event)
            elif watch.problem and not self._last_poll.problem:
                self._is_stale = True
            elif not watch.is_open:
                self._drop_watch()
                return

    def _take(self, event: WatchEvent) -> None:
        self._is_stale = True
        kinds: set[str] = set()
        if isinstance(event, Changes):
            kinds = {self._kind(change.item.key) for change in event.changes}
        self._other_records_changed |= bool(kinds & _OTHER_DIRECTORIES) or not isinstance(event, Changes)

    def _kind(self, key: bytes) -> str:
        parts = self._keys.parts(key.decode(errors="replace"))
        return parts[0] if parts else ""

    def _opened_watch(self) -> Watch | None:
        snapshot = self._last_poll.snapshot
        if snapshot is None or time.monotonic() < self._next_watch_s:
            return None
        keys = KeyRange.prefix(self._keys.prefix)
        self._watch = Watch(self._client, keys, start_revision=snapshot.revision + 1)
        return self._watch

    def _drop_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch, self._next_watch_s = None, time.monotonic() + _WATCH_AGAIN_S


def read_records(client: EtcdClient, keys: JobKeys) -> EtcdRecords:
    """Return the records that a JobSnapshot lacks: of check reports, the newest of each host; of evidence, that of the
    newest round that has any.

    Raises: CoordinationError.
    """
    cases, unreadable = read_cases(client, keys)
    checks: dict[str, CheckReport] = {}
    for report in decode_all(CheckReport, client.read_all(KeyRange.prefix(keys.directory("checks"))).items, unreadable):
        before = checks.get(report.host)
        if before is None or before.at_unix_s <= report.at_unix_s:
            checks[report.host] = report
    evidence: list[HangEvidence] = []
    newest = client.read(
        Range(KeyRange.prefix(keys.directory("evidence")), limit=1, is_newest_first=True, has_values=False)
    ).items
    if newest:
        of_round, _, _ = newest[0].key.decode(errors="replace").rpartition("/")
        evidence = decode_all(HangEvidence, client.read_all(KeyRange.prefix(f"{of_round}/")).items, unreadable)
    return EtcdRecords(tuple(cases), checks, tuple(evidence), tuple(unreadable[:20]))
