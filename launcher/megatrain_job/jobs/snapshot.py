"""A job as stored in etcd at one revision: reads ranges of keys, and decodes their records.

Records that cannot be decoded are left out, and `unreadable` names them, unless they are verdicts or outcomes. Of
rounds, halts, incidents, verdicts and outcomes only the newest are read, so that the read of a large job stays small.
Records that are older than the job's record belong to an earlier launch under the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DaemonRecord, DaemonReport, DashboardRecord
from megatrain.contracts.records.host_records import HostRecord, HostStatus
from megatrain.contracts.records.host_verdict import HostVerdict, OutcomeKind, VerdictConfidence, VerdictOutcome
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.notices import ReceiverRecord
from megatrain.contracts.records.problem_reports import DriverReport, JobProblem
from megatrain.contracts.records.record import RecordType, decode
from megatrain.contracts.records.rounds import Cordon, Halt, JobEnd, JobRecord, Round
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.election import leading_key
from megatrain_job.coordination.maintenance import alarms
from megatrain_job.coordination.wire import KeyRange, KeyValue, Range, shown

NUM_INCIDENTS = 100
"""More than the restarts that are allowed within an hour by default (recovery.restarts_per_hour)."""
_NUM_VERDICTS = 50
_NUM_AT_ONCE = 8
"""Number of ranges that are read at the same time. On a busy machine calls are slow, and a page has 0.7 s for all."""
_NUM_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The state of a job; rounds, halts and incidents are those of this launch. driver: empty if there is none."""

    job: str
    revision: int
    record: JobRecord | None = None
    hosts: Mapping[str, HostRecord] = field(default_factory=dict)
    statuses: Mapping[str, HostStatus] = field(default_factory=dict)
    rounds: Mapping[int, Round] = field(default_factory=dict)
    halts: Mapping[int, Halt] = field(default_factory=dict)
    cordons: Mapping[str, Cordon] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    """In the order of their ids, which is the order of time."""
    earlier_incidents: tuple[Incident, ...] = ()
    """Incidents of launches before this one."""
    waiting: tuple[tuple[VerdictOutcome, HostVerdict], ...] = ()
    """Verdicts that wait for a person."""
    unanswered: tuple[HostVerdict, ...] = ()
    """Verdicts of high confidence on the newest round that the driver has not answered."""
    end: JobEnd | None = None
    driver: str = ""
    report: DriverReport | None = None
    """The last report of the current driver."""
    dashboard_url: str = ""
    """Address of the job's web page; empty: none is served."""
    dashboard_host: str = ""
    """The machine that serves the page; empty: unknown."""
    daemon_session: str = ""
    """The session of the diagnostics daemon; empty: no daemon runs."""
    daemon_report: DaemonReport | None = None
    """The last report of a daemon of this launch. If its session is not `daemon_session`, that daemon is gone."""
    receivers: tuple[ReceiverRecord, ...] = ()
    """The receivers' records of notifications."""
    etcd_alarms: tuple[str, ...] = ()
    """etcd's alarms, if this user may read them: NOSPACE, for instance."""
    problems: tuple[JobProblem, ...] = ()
    """Problems of parts of the job that are not hosts."""
    unreadable: tuple[str, ...] = ()
    """The reason why records are left out, one sentence each."""

    @property
    def exists(self) -> bool:
        return self.record is not None or bool(self.hosts) or bool(self.rounds) or self.end is not None

    @property
    def has_driver_candidate(self) -> bool:
        return any(host.is_driver_candidate for host in self.hosts.values())

    @property
    def newest_round(self) -> Round | None:
        return self.rounds[max(self.rounds)] if self.rounds else None

    @property
    def newest_halt(self) -> Halt | None:
        """The halt of the newest round; None while the round may run."""
        newest = self.newest_round
        return None if newest is None else self.halts.get(newest.number)

    @property
    def effective_time_ratio(self) -> float | None:
        """The ratio for the job until its last incident was closed; None before any was closed."""
        known = [
            incident.effective_time_ratio for incident in self.incidents if incident.effective_time_ratio is not None
        ]
        return known[-1] if known else None

    def status_of(self, host: str, session: str) -> HostStatus | None:
        """Return the status of a host; None if there is none, or another session of the host wrote it."""
        status = self.statuses.get(host)
        return status if status is not None and status.session == session else None


class DecodedRecords:
    """A cache of decoded records, by key: most records are unchanged in the next read. Not thread-safe."""

    def __init__(self) -> None:
        self._before: dict[bytes, tuple[int, Any]] = {}
        self._now: dict[bytes, tuple[int, Any]] = {}

    def begin(self) -> None:
        """Begin another read. Records that the last read did not return are dropped."""
        self._before, self._now = self._now, {}

    def decode(self, kind: type[RecordType], item: KeyValue) -> RecordType:
        """Return the record of a key. Raises: CoordinationError."""
        known = self._before.get(item.key)
        if known is None or known[0] != item.mod_revision:
            known = (item.mod_revision, decode(kind, item.value, shown(item.key)))
        self._now[item.key] = known
        record: RecordType = known[1]
        return record


def read_job(
    client: EtcdClient,
    keys: JobKeys,
    *,
    num_incidents: int = NUM_INCIDENTS,
    decoded: DecodedRecords | None = None,
) -> JobSnapshot:
    """Read the present state of a job.

    num_incidents: the number of newest incidents to read; 0: all. decoded: records of the last read, for frequent
    readers.
    Raises: CoordinationError.
    """
    responses = client.read_together(
        [
            Range(KeyRange.key(keys.record)),
            Range(KeyRange.key(keys.end)),
            Range(KeyRange.prefix(f"{keys.election}/")),
            Range(KeyRange.key(keys.report)),
            Range(KeyRange.prefix(keys.directory("hosts"))),
            Range(KeyRange.prefix(keys.directory("status"))),
            Range(KeyRange.prefix(keys.directory("rounds")), limit=_NUM_ROUNDS, is_newest_first=True),
            Range(KeyRange.prefix(keys.directory("halts")), limit=_NUM_ROUNDS, is_newest_first=True),
            Range(KeyRange.prefix(keys.directory("cordons"))),
            Range(KeyRange.prefix(keys.directory("incidents")), limit=num_incidents, is_newest_first=True),
            Range(KeyRange.prefix(keys.directory("verdicts")), limit=_NUM_VERDICTS, is_newest_first=True),
            Range(KeyRange.prefix(keys.directory("outcomes")), limit=_NUM_VERDICTS, is_newest_first=True),
            Range(KeyRange.key(keys.dashboard)),
            Range(KeyRange.key(keys.daemon)),
            Range(KeyRange.key(keys.daemon_report)),
            Range(KeyRange.prefix(keys.directory("problems"))),
            Range(KeyRange.prefix(keys.directory("notices"))),
        ],
        num_at_once=_NUM_AT_ONCE,
    )
    parts = [response.items for response in responses]
    snapshot = snapshot_of(keys, responses[0].revision, parts, decoded or DecodedRecords())
    return replace(snapshot, etcd_alarms=_etcd_alarms(client))


def _etcd_alarms(client: EtcdClient) -> tuple[str, ...]:
    try:
        return tuple(sorted({alarm.name for alarm in alarms(client)}))
    except CoordinationError:  # where etcd has users, only root may read alarms; the snapshot is useful without them
        return ()


def snapshot_of(
    keys: JobKeys, revision: int, parts: Sequence[Sequence[KeyValue]], decoded: DecodedRecords
) -> JobSnapshot:
    """Return the snapshot from the ranges of `read_job`, in their order."""
    decoded.begin()
    read = partial(decode_all, decoded=decoded)
    record, end, driver, report, hosts, statuses, rounds, halts, cordons, incidents, *others = parts
    verdicts, outcomes, page, daemon, daemon_report, problems, notices = others
    unreadable: list[str] = []
    began = record[0].mod_revision if record else 0
    rounds, halts = ([item for item in items if item.create_revision > began] for items in (rounds, halts))
    leader = _leader(driver)
    reports = read(DriverReport, (item for item in report if item.mod_revision > began), unreadable)
    host_verdicts, verdict_outcomes = read(HostVerdict, verdicts, []), read(VerdictOutcome, outcomes, [])
    daemon_reports = read(DaemonReport, (item for item in daemon_report if item.mod_revision > began), unreadable)
    written = read(Round, rounds, unreadable)
    served = next(iter(read(DashboardRecord, page, unreadable)), None)
    old, new = (
        [incident for incident in incidents if (incident.create_revision > began) is is_new] for is_new in (False, True)
    )
    return JobSnapshot(
        job=keys.job,
        revision=revision,
        record=next(iter(read(JobRecord, record, unreadable)), None),
        end=next(iter(read(JobEnd, end, unreadable)), None),
        driver=leader,
        report=next((report for report in reports if report.driver == leader), None),
        hosts={host_record.host: host_record for host_record in read(HostRecord, hosts, unreadable)},
        statuses={status.host: status for status in read(HostStatus, statuses, unreadable)},
        rounds={round_.number: round_ for round_ in written},
        halts={halt.number: halt for halt in read(Halt, halts, unreadable)},
        cordons={cordon.host: cordon for cordon in read(Cordon, cordons, unreadable)},
        incidents=_by_id(read(Incident, new, unreadable)),
        earlier_incidents=_by_id(read(Incident, old, unreadable)),
        waiting=_waiting(host_verdicts, verdict_outcomes),
        unanswered=_unanswered(host_verdicts, verdict_outcomes, max((round_.number for round_ in written), default=0)),
        dashboard_url="" if served is None else served.url,
        dashboard_host="" if served is None else served.host,
        daemon_session=next((record.session for record in read(DaemonRecord, daemon, unreadable)), ""),
        daemon_report=next(iter(daemon_reports), None),
        problems=tuple(read(JobProblem, problems, unreadable)),
        receivers=tuple(read(ReceiverRecord, notices, unreadable)),
        unreadable=tuple(unreadable),
    )


def _waiting(
    verdicts: Iterable[HostVerdict], outcomes: Iterable[VerdictOutcome]
) -> tuple[tuple[VerdictOutcome, HostVerdict], ...]:
    """Return the verdicts that a person must decide on. The driver answers unreadable ones itself."""
    known = {verdict.verdict_id: verdict for verdict in verdicts}
    open_ = [outcome for outcome in outcomes if outcome.kind is OutcomeKind.WAITING]
    found = [(outcome, known[outcome.verdict_id]) for outcome in open_ if outcome.verdict_id in known]
    return tuple(sorted(found, key=lambda pair: pair[0].verdict_id))


def _unanswered(
    verdicts: Iterable[HostVerdict], outcomes: Iterable[VerdictOutcome], round_number: int
) -> tuple[HostVerdict, ...]:
    known = {outcome.verdict_id for outcome in outcomes}
    sure = [
        verdict
        for verdict in verdicts
        if verdict.round == round_number and verdict.confidence is VerdictConfidence.HIGH
    ]
    return tuple(verdict for verdict in sure if verdict.verdict_id not in known)


def _by_id(incidents: Sequence[Incident]) -> tuple[Incident, ...]:
    return tuple(sorted(incidents, key=lambda incident: incident.incident_id))


def decode_all(
    kind: type[RecordType], items: Iterable[KeyValue], unreadable: list[str], decoded: DecodedRecords | None = None
) -> list[RecordType]:
    """Return the records of keys. The problems of those that cannot be decoded are added to `unreadable`."""
    decoded = decoded or DecodedRecords()
    found: list[RecordType] = []
    for item in items:
        try:
            found.append(decoded.decode(kind, item))
        except CoordinationError as error:
            unreadable.append(str(error))
    return found


def _leader(candidates: Sequence[KeyValue]) -> str:
    """Return the name of the candidate that leads: the value of its key; empty if there is none."""
    leading = leading_key(candidates)
    return "" if leading is None else leading.value.decode(errors="replace") or "unnamed"
