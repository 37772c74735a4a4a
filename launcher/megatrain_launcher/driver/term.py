"""A term of the driver, from its election until it steps down: watch, decide, write.

Each decision is one transaction that requires this driver's current leadership revision and changes it. The driver
renews that revision before it reads: at the start, and after each write that got no response. So a transaction that
etcd applies late fails, and no decision from an outdated state is ever applied. See docs/adr/0036.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megatrain.contracts.closable import Closable
from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_verdict import AuditEntry, VerdictOutcome
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.problem_reports import DriverReport
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import Leadership
from megatrain_job.coordination.errors import NoSpaceError, UnknownOutcomeError
from megatrain_job.coordination.maintenance import HistoryTrimmer, alarms
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import Snapshot, WatchEvent
from megatrain_job.coordination.wire import Compare, KeyRange, Operation, Put
from megatrain_launcher.driver.actions import (
    AnswerRequest,
    Decision,
    EndJob,
    OpenIncident,
    Probe,
    RecordOutcome,
    UpdateIncident,
)
from megatrain_launcher.driver.decide import decide
from megatrain_launcher.driver.decision_log import CurrentAlarms, DecisionLog
from megatrain_launcher.driver.folding import fold
from megatrain_launcher.driver.incident_files import IncidentFiles
from megatrain_launcher.driver.incidents import kept_receipts
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.driver.probe import Prober
from megatrain_launcher.driver.resume_point_watch import ResumePointWatch
from megatrain_launcher.driver.run_watch import RunWatch
from megatrain_launcher.driver.state import ClusterState
from megatrain_launcher.driver.writes import trims_of, writes_of
from megatrain_launcher.liveness import LivenessReader
from megatrain_launcher.notify.notifier import Notifier

_logger = logging.getLogger(__name__)
_TICK_S = 0.2
_REPORT_S = 1.0
_PROBING_TICK_S = 0.02
_ANSWER_TTL_S = 60
_MAINTENANCE_S = 60.0
_MAX_EVENTS = 4096
"""The most watch events that are applied to the state before a decision."""
_HELD_UP_S = 1.0
"""A pass of the loop that begins later than this after the one before counts as delayed."""
_SETTLE_S = 0.5
"""After a delay, the watch reads waiting events for this time before the driver decides."""
_PAUSE_FACTOR = 4
"""The pause after a decision, as a multiple of the time it took to compute. Events of a pause are handled together."""
_MAX_PAUSE_S = 0.1


class Pace:
    """Limits when the driver decides: not while events of a delay are unread, and with a pause between two decisions.

    After a process was stopped, or its machine was suspended, the clock is far ahead and the events of that time are
    unread; healthy hosts would appear silent. Times are monotonic. Not thread-safe.
    """

    def __init__(self, now_s: float) -> None:
        self._began_pass_s = now_s
        self._settled_s = now_s

    def begin_pass(self, now_s: float) -> float:
        """Record the start of a pass of the loop; return the seconds by which it was delayed, 0 if it was not."""
        held_up_s = now_s - self._began_pass_s
        self._began_pass_s = now_s
        if held_up_s <= _HELD_UP_S:
            return 0.0
        self._settled_s = now_s + _SETTLE_S
        return held_up_s

    def may_decide(self, now_s: float) -> bool:
        return now_s >= self._settled_s

    @staticmethod
    def pause_s(decision_s: float) -> float:
        """Return the pause after a decision that took `decision_s` to make."""
        return min(_MAX_PAUSE_S, _PAUSE_FACTOR * decision_s)


class Term(Closable):
    """One leadership of this driver, from its election until it steps down."""

    def __init__(
        self,
        client: EtcdClient,
        keys: JobKeys,
        host: str,
        policy: Policy,
        leadership: Leadership,
        files: IncidentFiles,
        run_watch: RunWatch,
        resume_point_watch: ResumePointWatch,
        liveness: LivenessReader,
        clock: Callable[[], float],
        notifier: Notifier | None = None,
    ) -> None:
        self._client = client
        self._keys = keys
        self._host = host
        self._policy = policy
        self._notifier = notifier
        self._is_job_over = False
        self._leadership = leadership
        self._files = files
        self._run_watch = run_watch
        self._resume_point_watch = resume_point_watch
        self._clock = clock
        self._prober = Prober(liveness, clock)
        self._trimmer = HistoryTrimmer(client)
        self._alarms = CurrentAlarms()
        self._log = DecisionLog()
        self._state = ClusterState(keys=keys, observer=host, began=clock())
        self._awaited = 0
        """The driver makes its next decision only after it has seen this revision."""
        self._report = DriverReport(host, "", 0.0)
        self._reported_at = 0.0
        self._maintained_at = clock()

    def close(self) -> None:
        """End the probes and the notifier; at the end of the job, record the receipts of its last notifications."""
        self._prober.close()
        if self._notifier is not None:
            is_job_over = self._is_job_over or self._state.end is not None
            self._notifier.close(is_job_over=is_job_over)
            if is_job_over:
                self._keep_last_receipts()

    def _keep_last_receipts(self) -> None:
        """Add to incidents the receipts of notifications that were sent after the last decision of an ended job."""
        now = self._clock()
        try:
            notices = self._client.read_all(KeyRange.prefix(self._keys.directory("notices")))
            incidents = self._client.read_all(KeyRange.prefix(self._keys.directory("incidents")))
            found = Snapshot(incidents.revision, (*notices.items, *incidents.items), "the job is over")
            updates = kept_receipts(fold(ClusterState(self._keys, self._host, now), (found,), now))
            if updates and self._transact(writes_of(updates, self._keys).operations):
                for update in updates:
                    self._files.write(update.incident)
        except CoordinationError as error:
            _logger.warning("receipts of the last notifications are not recorded in the job's incidents: %s", error)

    def lead(self, stop: threading.Event, set_reason: Callable[[str], None]) -> None:
        """Drive until `stop` is set, or until leadership is in doubt.

        Raises: CoordinationError, such as LeadershipLostError.
        """
        while not stop.is_set() and self._leadership.is_certain:
            try:
                self._awaited = self._leadership.renew_revision()
                # all waiting times restart, because this driver may have missed reports of hosts
                self._state = ClusterState(keys=self._keys, observer=self._host, began=self._clock())
                with Watch(self._client, KeyRange.prefix(self._keys.prefix)) as watch:
                    self._follow(watch, stop, set_reason)
            except UnknownOutcomeError as error:
                _logger.warning("a decision may or may not have been applied; everything is read again: %s", error)
                stop.wait(_TICK_S)

    def _follow(self, watch: Watch, stop: threading.Event, set_reason: Callable[[str], None]) -> None:
        """Decide on the events of a watch until it breaks; the caller then reads everything again."""
        is_first = True
        pace = Pace(time.monotonic())
        while not stop.is_set() and self._leadership.is_certain and watch.is_open and not watch.problem:
            event = watch.next(_PROBING_TICK_S if self._prober.is_busy else _TICK_S)
            began = time.monotonic()
            held_up_s = pace.begin_pass(began)
            if held_up_s and not is_first:
                text = "this driver was delayed by %.1f s, by etcd or its machine; it reads new events, then decides"
                _logger.warning(text, held_up_s)
            if not self._take(event, watch):
                _logger.warning("etcd was restored to an older state; everything is read again")
                return
            if self._state.revision < max(self._awaited, 1) or not pace.may_decide(began):
                continue  # the events of this driver's last write, or of a delay, have not been read yet
            if is_first:
                is_first = False
                for incident in self._state.incidents.values():
                    self._files.write(incident)
                for verdict_id in sorted(self._state.outcomes):
                    self._audit(self._state.outcomes[verdict_id])
            decision = decide(self._clock(), self._state, self._policy)
            set_reason(decision.reason)
            decision_s = time.monotonic() - began
            try:
                self._carry_out(decision)
            except NoSpaceError as error:  # training continues; only decisions wait for space
                self._alarms.add_refusal(str(error))
                stop.wait(_REPORT_S / 2)
            self._maintain()
            stop.wait(pace.pause_s(decision_s))

    def _take(self, event: WatchEvent | None, watch: Watch) -> bool:
        """Apply an event and all queued ones to the state. Return False if etcd lacks this driver's last write."""
        events: list[WatchEvent] = []
        while event is not None:
            if isinstance(event, Snapshot) and event.revision < self._awaited:
                return False
            events.append(event)
            event = watch.next(0.0) if len(events) < _MAX_EVENTS else None
        if events:
            self._state = fold(self._state, events, self._clock())
            self._prober.reach_new_hosts(self._state.hosts.values())
        results = self._prober.take()
        if results:
            self._state = self._state.with_probes(results)
        return True

    def _carry_out(self, decision: Decision) -> None:
        for action in decision.actions:
            if isinstance(action, Probe):
                self._prober.start(action)
        self._alarms.update(decision)
        line = self._log.line(decision, self._clock())
        if line:
            _logger.info("%s", line)
        lease_id = 0
        if any(isinstance(action, AnswerRequest) for action in decision.actions):
            lease_id = self._client.grant_lease(_ANSWER_TTL_S).lease_id
        damaged = self._state.damaged_revisions
        writes = writes_of(decision.actions, self._keys, answer_lease_id=lease_id, damaged=damaged)
        if writes.operations:
            if self._transact(writes.operations, writes.conditions):
                for action in decision.actions:
                    if isinstance(action, OpenIncident | UpdateIncident):
                        self._files.write(action.incident)
                    elif isinstance(action, RecordOutcome):
                        self._audit(action.outcome)
                    elif isinstance(action, EndJob):
                        self._is_job_over = True
                if self._notifier is not None:
                    self._notifier.wake()
        else:
            self._publish_report(decision)

    def _audit(self, outcome: VerdictOutcome) -> None:
        self._files.audit(AuditEntry(outcome, self._state.verdicts.get(outcome.verdict_id)))

    def _transact(self, operations: tuple[Operation, ...], conditions: tuple[Compare, ...] = ()) -> bool:
        """Return whether etcd applied the transaction.

        Raises: CoordinationError, such as LeadershipLostError, UnknownOutcomeError or NoSpaceError.
        """
        response = self._leadership.txn(operations, conditions)
        self._awaited = response.revision
        if not response.succeeded:
            _logger.info("a decision was not applied: the state that it was based on has changed")
        return response.succeeded

    def _publish_report(self, decision: Decision) -> None:
        """Write the driver's report when it has changed, at most once a second."""
        now = self._clock()
        problem = (self._files.problem,) if self._files.problem else ()
        notifier_problems = () if self._notifier is None else self._notifier.problems
        since = now if decision.reason != self._report.reason else self._report.since_unix_s
        report = DriverReport(
            driver=self._host,
            reason=decision.reason,
            since_unix_s=since,
            alarms=(*self._alarms.texts, *problem, *notifier_problems),
            removed=self._run_watch.problems,
            checkpoint_damage=self._resume_point_watch.damage,
        )
        if report == self._report or now - self._reported_at < _REPORT_S:
            return
        self._reported_at = now
        if self._transact((Put(self._keys.report, encode(report)),)):
            self._report = report

    def _maintain(self) -> None:
        """Periodically trim etcd's history and the job's keys, and read etcd's alarms."""
        now = self._clock()
        if now - self._maintained_at < _MAINTENANCE_S:
            return
        self._maintained_at = now
        try:
            self._trimmer.tick(now)
            self._alarms.set_etcd_alarms(alarms(self._client))
        except CoordinationError as error:
            _logger.warning("etcd's history was not trimmed, or its alarms were not read: %s", error)
        if trims := trims_of(self._keys, self._state.seen):
            try:
                self._transact(tuple(trims))
            except NoSpaceError as error:
                self._alarms.add_refusal(str(error))
