"""What the driver can decide to do. Values only: `writes` turns them into a transaction, `driver` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.host_verdict import VerdictOutcome
from megatrain.contracts.incident import Incident
from megatrain.contracts.job_requests import Answer
from megatrain.contracts.rounds import Cordon, Halt, HostCommand, JobEnd, Round, RoundDeadlines


@dataclass(frozen=True, slots=True)
class HaltRound:
    halt: Halt


@dataclass(frozen=True, slots=True)
class WriteRound:
    """`vanished`: hosts without a lease that were waited out. Should one be registered again, nothing is written."""

    round: Round
    vanished: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RaiseDeadlines:
    """Have all hosts of a round go by a longer interval; `revision`: of what is replaced, 0 where nothing is."""

    deadlines: RoundDeadlines
    revision: int


@dataclass(frozen=True, slots=True)
class SkipRound:
    """Give up the number of a round whose record cannot be read, written at `revision`."""

    halt: Halt
    revision: int


@dataclass(frozen=True, slots=True)
class DropKey:
    """Take away a key that means nothing, if it is still the one that was written at `revision`."""

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
    """The last answer takes the request away."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class RecordOutcome:
    """Say what became of a verdict. The final outcome is the last one of it."""

    outcome: VerdictOutcome


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a host's executor whether it lives: the only action that writes nothing."""

    host: str
    session: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """What an operator should know, as long as decisions say so. `topic` tells alarms apart."""

    topic: str
    text: str


Action = (
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
    """`reason` says in a sentence what the job does now, also where nothing has to be done."""

    actions: tuple[Action, ...]
    reason: str
