"""Turns a decision into one etcd transaction of conditions and writes. Pure functions: no I/O and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatrain.contracts.records.job_keys import JobKeys, key_number
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.wire import Compare, Delete, KeyRange, Operation, Put, as_bytes
from megatrain_launcher.driver.actions import (
    AnswerRequest,
    CordonHost,
    DriverAction,
    DropKey,
    EndJob,
    HaltRound,
    OpenIncident,
    RaiseDeadlines,
    RecordOutcome,
    SendCommand,
    SkipRound,
    UpdateIncident,
    WriteRound,
)
from megatrain_launcher.driver.state import Seen

_MAX_OPERATIONS = 100
"""etcd allows 128 operations in a transaction by default."""
_NUM_ROUNDS, _NUM_INCIDENTS, _NUM_VERDICTS = 50, 500, 500
"""The numbers of rounds, incidents and verdicts that are kept in etcd."""
_FIRST = (HaltRound, WriteRound, SkipRound, EndJob, OpenIncident, SendCommand)
"""Actions that must not wait for the next transaction if this one is full."""
_SECOND = (UpdateIncident, CordonHost, RecordOutcome)
_NUMBERED = ("rounds", "halts", "deadlines", "evidence", "commands")
"""Directories of keys whose first part is a number: of a round, or of a command."""


@dataclass(frozen=True, slots=True)
class Writes:
    """A transaction: the operations are carried out if all conditions hold."""

    conditions: tuple[Compare, ...]
    operations: tuple[Operation, ...]


def writes_of(
    actions: Iterable[DriverAction],
    keys: JobKeys,
    *,
    answer_lease_id: int = 0,
    damaged: Mapping[str, int] | None = None,
) -> Writes:
    """Return the transaction of a decision. Rounds, halts, commands and the end are only created, never changed.

    Halts and rounds are written first; writes that do not fit into the transaction wait for the next decision.
    `damaged`: the unreadable keys, each with the revision of its value. A halt or an end replaces an unreadable value,
    a round never does.
    """
    conditions: list[Compare] = []
    operations: list[Operation] = []
    for action in sorted(actions, key=_urgency):
        if len(operations) >= _MAX_OPERATIONS:
            break
        _add(action, keys, answer_lease_id, damaged or {}, conditions, operations)
    # etcd refuses a transaction that puts a key twice, so only the last put of a key is kept
    puts = {as_bytes(operation.key): operation for operation in operations if isinstance(operation, Put)}
    rest = (operation for operation in operations if not isinstance(operation, Put))
    return Writes(tuple(conditions), (*puts.values(), *rest))


def _urgency(action: DriverAction) -> int:
    if isinstance(action, _FIRST):
        return 0
    return 1 if isinstance(action, _SECOND) else 2


def _add(
    action: DriverAction,
    keys: JobKeys,
    answer_lease_id: int,
    damaged: Mapping[str, int],
    conditions: list[Compare],
    operations: list[Operation],
) -> None:
    match action:
        case HaltRound(halt=halt):
            key = keys.halt(halt.number)
            conditions += [_is_free(key, damaged), _is_free(keys.round(halt.number + 1), damaged)]
            operations.append(Put(key, encode(halt)))
        case WriteRound(round=round_, vanished=vanished):
            key = keys.round(round_.number)
            conditions += [Compare.is_absent(keys.host(host)) for host in vanished[:_MAX_OPERATIONS]]
            conditions += [Compare.is_absent(key), _is_free(keys.end, damaged)]
            if round_.number > 1:
                conditions.append(Compare.is_present(keys.halt(round_.number - 1)))
            operations.append(Put(key, encode(round_)))
        case RaiseDeadlines(deadlines=deadlines, revision=revision):
            key = keys.deadlines(deadlines.number)
            conditions.append(Compare.mod_revision(key, revision) if revision else Compare.is_absent(key))
            operations.append(Put(key, encode(deadlines)))
        case SkipRound(halt=halt, revision=revision):
            key = keys.halt(halt.number)
            conditions += [_is_free(key, damaged), Compare.mod_revision(keys.round(halt.number), revision)]
            operations.append(Put(key, encode(halt)))
        case EndJob(end=end):
            conditions.append(_is_free(keys.end, damaged))
            operations.append(Put(keys.end, encode(end)))
        case SendCommand(command=command):
            key = keys.command(command.number)
            conditions.append(Compare.is_absent(key))
            operations.append(Put(key, encode(command)))
        case OpenIncident(incident=incident) | UpdateIncident(incident=incident):
            operations.append(Put(keys.incident(incident.incident_id), encode(incident)))
        case CordonHost(cordon=cordon):
            operations.append(Put(keys.cordon(cordon.host), encode(cordon)))
        case AnswerRequest(answer=answer):
            operations.append(Put(keys.answer(answer.request_id), encode(answer), answer_lease_id))
            if answer.is_done:
                operations.append(Delete(KeyRange.key(keys.request(answer.request_id))))
        case RecordOutcome(outcome=outcome):
            operations.append(Put(keys.outcome(outcome.verdict_id), encode(outcome)))
        case DropKey(key=key, revision=revision):
            conditions.append(Compare.mod_revision(key, revision))
            operations.append(Delete(KeyRange.key(key)))
        case _:
            pass  # probes and alarms write nothing


def _is_free(key: str, damaged: Mapping[str, int]) -> Compare:
    """Return the condition that a key does not exist, or still has the same unreadable value."""
    return Compare.mod_revision(key, damaged[key]) if key in damaged else Compare.is_absent(key)


def trims_of(
    keys: JobKeys,
    present: Mapping[str, Seen],
    *,
    num_verdicts: int = _NUM_VERDICTS,
) -> Sequence[Delete]:
    """Return deletions of old rounds with their records, old commands, incidents and answered verdicts.

    Evidence of a round is deleted as one range, for any number of hosts. Keys with unknown names are not deleted.
    """
    numbers: dict[str, set[int]] = {kind: set() for kind in _NUMBERED}
    incidents: list[str] = []
    for key in present:
        kind, *rest = keys.parts(key) or ("",)
        if kind in _NUMBERED and rest and (number := key_number(rest[0])) is not None:
            numbers[kind].add(number)
        elif kind == "incidents" and len(rest) == 1:
            incidents.append(key)
    kept = set(sorted(numbers["rounds"] | numbers["halts"])[-_NUM_ROUNDS:])
    stale = [keys.round(number) for number in sorted(numbers["rounds"] - kept)]
    stale += [keys.halt(number) for number in sorted(numbers["halts"] - kept)]
    stale += [keys.deadlines(number) for number in sorted(numbers["deadlines"] - kept)]
    stale += [keys.command(number) for number in sorted(numbers["commands"])[:-_NUM_ROUNDS]]
    # by revision, because ids contain times of different drivers' clocks
    stale += sorted(incidents, key=lambda key: present[key].create_revision)[:-_NUM_INCIDENTS]
    stale += _stale_verdicts(keys, present, num_verdicts)
    evidence = [KeyRange.prefix(keys.evidence(number, "")) for number in sorted(numbers["evidence"] - kept)]
    ranges = (*evidence, *(KeyRange.key(key) for key in stale))
    return [Delete(key_range) for key_range in ranges[:_MAX_OPERATIONS]]


def _stale_verdicts(keys: JobKeys, present: Mapping[str, Seen], num_verdicts: int) -> list[str]:
    """Return the keys of outcomes without a verdict and of old verdicts with outcomes, each verdict before its outcome.

    If the outcome were deleted first, the driver would decide on the verdict again.
    """
    names: dict[str, set[str]] = {"verdicts": set(), "outcomes": set()}
    for key in present:
        kind, *rest = keys.parts(key) or ("",)
        if kind in names and len(rest) == 1:
            names[kind].add(rest[0])
    answered = sorted(
        names["verdicts"] & names["outcomes"], key=lambda name: present[keys.verdict(name)].create_revision
    )
    old = answered[: max(0, len(answered) - num_verdicts)]
    left_over = sorted(keys.outcome(name) for name in names["outcomes"] - names["verdicts"])
    return [*left_over, *(key for name in old for key in (keys.verdict(name), keys.outcome(name)))]
