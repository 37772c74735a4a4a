"""A decision as one etcd transaction: conditions that must still hold, and what is written. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import encode
from megatrain.coordination.wire import Compare, Delete, KeyRange, Operation, Put, as_bytes
from megatrain_launcher.driver.actions import (
    Action,
    AnswerRequest,
    CordonHost,
    EndJob,
    HaltRound,
    OpenIncident,
    SendCommand,
    UpdateIncident,
    WriteRound,
)

_MAX_OPERATIONS = 100
"""etcd takes 128 in one transaction unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Writes:
    conditions: tuple[Compare, ...]
    operations: tuple[Operation, ...]


def writes_of(actions: Iterable[Action], keys: JobKeys, *, answer_lease_id: int = 0) -> Writes:
    """Return what a decision writes. Rounds, halts, commands and the end are only ever created, never changed.

    What does not fit into one transaction is left to the next decision: halts and rounds come first.
    """
    conditions: list[Compare] = []
    operations: list[Operation] = []
    for action in sorted(actions, key=_urgency):
        if len(operations) >= _MAX_OPERATIONS:
            break
        _add(action, keys, answer_lease_id, conditions, operations)
    # etcd refuses a transaction that puts a key twice: the last word counts
    puts = {as_bytes(one.key): one for one in operations if isinstance(one, Put)}
    rest = (one for one in operations if not isinstance(one, Put))
    return Writes(tuple(conditions), (*puts.values(), *rest))


def _urgency(action: Action) -> int:
    return 0 if isinstance(action, HaltRound | WriteRound | EndJob | OpenIncident | CordonHost | SendCommand) else 1


def _add(
    action: Action, keys: JobKeys, answer_lease_id: int, conditions: list[Compare], operations: list[Operation]
) -> None:
    match action:
        case HaltRound(halt=halt):
            key = keys.halt(halt.number)
            conditions += [Compare.is_absent(key), Compare.is_absent(keys.round(halt.number + 1))]
            operations.append(Put(key, encode(halt)))
        case WriteRound(round=round_):
            key = keys.round(round_.number)
            conditions += [Compare.is_absent(key), Compare.is_absent(keys.end)]
            if round_.number > 1:
                conditions.append(Compare.is_present(keys.halt(round_.number - 1)))
            operations.append(Put(key, encode(round_)))
        case EndJob(end=end):
            conditions.append(Compare.is_absent(keys.end))
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
        case _:
            pass  # probes and alarms write nothing


def trims_of(
    keys: JobKeys, present: Iterable[str], *, num_rounds: int = 50, num_incidents: int = 200
) -> Sequence[Delete]:
    """Return deletions of all but the newest rounds with what belongs to them, commands, and incidents."""
    by_kind: dict[str, list[tuple[str, str]]] = {}
    for key in present:
        kind, *rest = keys.parts(key) or ("",)
        if kind in ("rounds", "halts", "evidence", "commands", "incidents") and rest:
            by_kind.setdefault(kind, []).append((rest[0], key))
    numbers = {number for kind in ("rounds", "halts") for number, _ in by_kind.get(kind, [])}
    kept = set(sorted(numbers)[-num_rounds:])
    commands = {number for number, _ in by_kind.get("commands", [])}
    kept_commands = set(sorted(commands)[-num_rounds:])
    ids = {number for number, _ in by_kind.get("incidents", [])}
    kept_ids = set(sorted(ids)[-num_incidents:])
    keep = {"rounds": kept, "halts": kept, "evidence": kept, "commands": kept_commands, "incidents": kept_ids}
    stale = sorted(key for kind, found in by_kind.items() for name, key in found if name not in keep[kind])
    return [Delete(KeyRange.key(key)) for key in stale[:_MAX_OPERATIONS]]
