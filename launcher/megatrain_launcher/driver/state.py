"""The input of a decision: an immutable copy of the job's keys in etcd, with the times at which this driver saw them.

The times at which a key appeared or changed, or a lease was gone, are of this driver's clock. They restart with a new
driver, which can only make it wait longer. `folding` applies watch events to this value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatrain.contracts.records.host_records import (
    CheckReport,
    HangEvidence,
    HostPhase,
    HostRecord,
    HostStatus,
    RankFailure,
)
from megatrain.contracts.records.host_verdict import HostVerdict, VerdictOutcome
from megatrain.contracts.records.incident import Incident, IncidentState
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.job_requests import Answer, JobRequest
from megatrain.contracts.records.notices import ReceiverRecord
from megatrain.contracts.records.rounds import (
    Cordon,
    Halt,
    HostCommand,
    JobEnd,
    JobRecord,
    Round,
    RoundDeadlines,
    RoundHost,
)
from megatrain_launcher.driver.probe import ProbeResult
from megatrain_launcher.liveness import Liveness

_STOPPED_PHASES = (HostPhase.STOPPED, HostPhase.PARKED, HostPhase.DONE)


@dataclass(frozen=True, slots=True)
class Seen:
    """The revisions of a key, and when this driver first saw it (`since`) and last saw its value change (`changed`)."""

    create_revision: int
    mod_revision: int
    since: float
    changed: float


@dataclass(frozen=True, slots=True)
class Departed:
    """A host whose registration is gone, and when this driver saw that."""

    record: HostRecord
    at: float


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The state that `decide` reads. `statuses` also has the last status of each host that is gone."""

    keys: JobKeys
    observer: str
    began: float
    """The time at which this driver began to watch."""
    revision: int = 0
    job: JobRecord | None = None
    end: JobEnd | None = None
    hosts: Mapping[str, HostRecord] = field(default_factory=dict)
    statuses: Mapping[str, HostStatus] = field(default_factory=dict)
    rounds: Mapping[int, Round] = field(default_factory=dict)
    halts: Mapping[int, Halt] = field(default_factory=dict)
    deadlines: Mapping[int, RoundDeadlines] = field(default_factory=dict)
    evidence: Mapping[tuple[int, str], HangEvidence] = field(default_factory=dict)
    commands: Mapping[int, HostCommand] = field(default_factory=dict)
    requests: Mapping[str, JobRequest] = field(default_factory=dict)
    answers: Mapping[str, Answer] = field(default_factory=dict)
    checks: Mapping[tuple[str, str], CheckReport] = field(default_factory=dict)
    cordons: Mapping[str, Cordon] = field(default_factory=dict)
    incidents: Mapping[str, Incident] = field(default_factory=dict)
    verdicts: Mapping[str, HostVerdict] = field(default_factory=dict)
    outcomes: Mapping[str, VerdictOutcome] = field(default_factory=dict)
    receivers: Mapping[str, ReceiverRecord] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Keys whose value cannot be read, with the error."""
    seen: Mapping[str, Seen] = field(default_factory=dict)
    departed: Mapping[str, Departed] = field(default_factory=dict)
    stalled_since: Mapping[str, float] = field(default_factory=dict)
    advanced_at: Mapping[str, float] = field(default_factory=dict)
    """The time at which a host's completed steps were last seen to increase."""
    failures: Mapping[int, Mapping[int, RankFailure]] = field(default_factory=dict)
    """By round and rank, including ranks of hosts that are gone."""
    probes: Mapping[str, ProbeResult] = field(default_factory=dict)

    @property
    def round(self) -> Round | None:
        """The newest round."""
        return self.rounds[max(self.rounds)] if self.rounds else None

    @property
    def next_number(self) -> int:
        return max([0, *self.rounds, *self.halts]) + 1

    @property
    def next_command(self) -> int:
        """The next number for a command; an unreadable command does not block it."""
        number = max(self.commands, default=0) + 1
        while self.keys.command(number) in self.damaged:
            number += 1
        return number

    @property
    def damaged_revisions(self) -> Mapping[str, int]:
        """For each unreadable key, the revision at which its value was written."""
        return {key: self.seen[key].mod_revision for key in self.damaged if key in self.seen}

    def is_of_older_launch(self, round_: Round) -> bool:
        """Return whether a round was written before the job's latest launch.

        Compares revisions of etcd, because clocks of hosts differ.
        """
        job, own = self.seen.get(self.keys.record), self.seen.get(self.keys.round(round_.number))
        return job is not None and own is not None and own.create_revision < job.mod_revision

    def created(self, key: str) -> int:
        """Return the revision at which a key was created; for an absent key, the next revision.

        Revisions order events without relying on clocks.
        """
        found = self.seen.get(key)
        return self.revision + 1 if found is None else found.create_revision

    def opened(self, incident: Incident) -> int:
        """Return the revision at which an incident was opened."""
        return self.created(self.keys.incident(incident.incident_id))

    def is_of_this_launch(self, incident: Incident) -> bool:
        """Return whether an incident was opened in the current launch of the job.

        Compares revisions of etcd, because clocks of hosts differ.
        """
        job = self.seen.get(self.keys.record)
        return job is None or self.opened(incident) > job.mod_revision

    def since(self, key: str, default: float | None = None) -> float:
        """Return when this driver first saw a key; for an absent key, `default`, or when this driver began to watch."""
        found = self.seen.get(key)
        if found is not None:
            return found.since
        return self.began if default is None else default

    def seen_at(self, key: str) -> float:
        """Return when this driver last saw a key's value change; without the key, when it began to watch."""
        found = self.seen.get(key)
        return self.began if found is None else found.changed

    def evidence_of(self, round_: Round) -> dict[str, HangEvidence]:
        """Return, by host, the evidence for a round that its hosts wrote in the sessions that the round names."""
        found = {part.host: self.evidence.get((round_.number, part.host)) for part in round_.hosts}
        sessions = {part.host: part.session for part in round_.hosts}
        return {host: one for host, one in found.items() if one is not None and one.session == sessions[host]}

    def is_registered(self, part: RoundHost) -> bool:
        """Return whether this session of a round's host is registered now."""
        record = self.hosts.get(part.host)
        return record is not None and record.session == part.session

    def status_of(self, part: RoundHost, number: int) -> HostStatus | None:
        """Return the status that a host's session reported for a round; None if there is none yet."""
        status = self.statuses.get(part.host)
        if status is None or status.session != part.session or status.round != number:
            return None
        return status

    def has_stopped(self, part: RoundHost, number: int) -> bool:
        """Return whether the host reported that all of its workers of this round are gone."""
        status = self.status_of(part, number)
        if status is None:
            return False
        return status.phase in _STOPPED_PHASES or (status.phase is HostPhase.FAILED and _is_none_alive(status))

    def has_left_round(self, part: RoundHost, number: int) -> bool:
        """Return whether the host's status, for this round or a later one, shows that all of its workers are gone."""
        status = self.statuses.get(part.host)
        has_reported = status is not None and status.session == part.session and status.round >= number
        return has_reported and status is not None and self.has_stopped(part, status.round)

    def gone_since(self, part: RoundHost) -> float:
        """Return when this driver saw that a host left; if it left earlier, the start of this driver's watch."""
        left = self.departed.get(part.host)
        if left is not None and left.record.session == part.session:
            return left.at
        return self.began

    def proof_of_death(self, part: RoundHost) -> str:
        """Return the proof that this session of a host is over; empty if there is none."""
        record = self.hosts.get(part.host)
        if record is not None and record.session != part.session:
            return f"{part.host} was restarted: its earlier executor and workers are gone"
        found = self.probes.get(part.host)
        if found is not None and found.session == part.session and found.liveness is Liveness.DEAD:
            return f"{part.host}: {found.detail}"
        return ""

    def proven_at(self, part: RoundHost) -> float:
        """Return when `proof_of_death` was found. The host may have trained until then, with or without a lease."""
        record = self.hosts.get(part.host)
        if record is not None and record.session != part.session:
            return max(self.gone_since(part), self.since(self.keys.host(part.host)))
        return self.probes[part.host].at

    def open_incidents(self) -> tuple[Incident, ...]:
        """Return the incidents of this launch that are not over, in the order of their ids."""
        return tuple(incident for incident in self._unclosed() if self.is_of_this_launch(incident))

    def abandoned_incidents(self) -> tuple[Incident, ...]:
        """Return the incidents that an earlier launch left open because it ended without a driver."""
        return tuple(incident for incident in self._unclosed() if not self.is_of_this_launch(incident))

    def _unclosed(self) -> list[Incident]:
        found = (self.incidents[key] for key in sorted(self.incidents))
        return [incident for incident in found if incident.state is IncidentState.OPEN]

    def with_probes(self, results: tuple[ProbeResult, ...]) -> ClusterState:
        """Return the state with the results of probes added."""
        return replace(self, probes={**self.probes, **{result.host: result for result in results}})


def _is_none_alive(status: HostStatus) -> bool:
    try:
        return int(status.alive_ranks or "0", 16) == 0
    except ValueError:
        return False
