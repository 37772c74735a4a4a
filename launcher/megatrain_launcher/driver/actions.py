"""The actions of a decision, as plain values: `writes` turns them into a transaction, `term` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.records.host_verdict import VerdictOutcome
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.job_requests import Answer
from megatrain.contracts.records.rounds import Cordon, Halt, HostCommand, JobEnd, Round, RoundDeadlines


@dataclass(frozen=True, slots=True)
class HaltRound:
    halt: Halt


@dataclass(frozen=True, slots=True)
class WriteRound:
    """`vanished`: hosts that count as gone (see `Stopping`). The write fails if one of them has registered again."""

    round: Round
    vanished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RaiseDeadlines:
    """Publish longer deadlines to all hosts of a round.

    `revision`: the revision of the record that this one replaces; 0 if there is none.
    """

    deadlines: RoundDeadlines
    revision: int


@dataclass(frozen=True, slots=True)
class SkipRound:
    """Skip the number of a round whose record, written at `revision`, cannot be read."""

    halt: Halt
    revision: int


@dataclass(frozen=True, slots=True)
class DropKey:
    """Delete a key if it is unchanged since `revision`."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class EndJob:
    end: JobEnd


@dataclass(frozen=True, slots=True)
class SendCommand:
    command: HostCommand


@dataclass(frozen=True, slots=True)
class OpenIncident:
    incident: Incident


@dataclass(frozen=True, slots=True)
class UpdateIncident:
    incident: Incident


@dataclass(frozen=True, slots=True)
class CordonHost:
    cordon: Cordon


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Answer a request. A final answer (`is_done`) also deletes the request."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class RecordOutcome:
    """Record the outcome of a verdict. A later outcome replaces an earlier one, until it is final."""

    outcome: VerdictOutcome


@dataclass(frozen=True, slots=True)
class Probe:
    """Probe whether a host's executor lives. Writes nothing to etcd."""

    host: str
    session: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """A condition to report to an operator. Every decision repeats it while it lasts. `topic` identifies the alarm."""

    topic: str
    text: str


DriverAction = (
    HaltRound
    | WriteRound
    | RaiseDeadlines
    | SkipRound
    | DropKey
    | EndJob
    | SendCommand
    | OpenIncident
    | UpdateIncident
    | CordonHost
    | AnswerRequest
    | RecordOutcome
    | Probe
    | Alarm
)


@dataclass(frozen=True, slots=True)
class Decision:
    """`reason` is a sentence about what the job does now; it is set even if there is no action."""

    actions: tuple[DriverAction, ...]
    reason: str
