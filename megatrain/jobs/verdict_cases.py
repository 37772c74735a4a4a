"""Verdicts together with what the driver made of them: from etcd, or from the audit that the driver leaves on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.host_verdict import AuditEntry, HostVerdict, VerdictOutcome
from megatrain.contracts.job_keys import JobKeys
from megatrain.contracts.record import RecordType, decode
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.wire import KeyRange, Range


@dataclass(frozen=True, slots=True)
class Case:
    """A verdict and its newest outcome; one of them may be missing, or not to be read."""

    verdict_id: str
    verdict: HostVerdict | None
    outcome: VerdictOutcome | None


def read_cases(client: EtcdClient, keys: JobKeys) -> tuple[list[Case], list[str]]:
    """Return what etcd has, the oldest first, and what is wrong with records that are left out.

    Raises: CoordinationError.
    """
    places = [keys.directory(name) for name in ("verdicts", "outcomes")]
    answer = client.txn([], [Range(KeyRange.prefix(place)) for place in places], is_repeatable=True)
    raw = [
        {item.key.decode(errors="replace").removeprefix(place): item.value for item in answer.range_answer(index).items}
        for index, place in enumerate(places)
    ]
    unreadable: list[str] = []
    verdicts = _decoded(HostVerdict, raw[0], unreadable)
    outcomes = _decoded(VerdictOutcome, raw[1], unreadable)
    names = sorted(verdicts.keys() | outcomes.keys())
    return [Case(name, verdicts.get(name), outcomes.get(name)) for name in names], unreadable


def cases_of_audit(entries: Iterable[AuditEntry]) -> list[Case]:
    """Return the cases that an audit tells of, the oldest first."""
    # of a verdict that waited there are two outcomes: the last one counts
    newest = {one.outcome.verdict_id: Case(one.outcome.verdict_id, one.verdict, one.outcome) for one in entries}
    return [newest[name] for name in sorted(newest)]


def merged_cases(of_disk: Iterable[Case], of_etcd: Iterable[Case]) -> list[Case]:
    """Return the cases of both, the oldest first; of one that both have, what etcd has counts as far as it goes."""
    found = {one.verdict_id: one for one in of_disk}
    for one in of_etcd:
        before = found.get(one.verdict_id)
        if before is not None:
            one = Case(one.verdict_id, one.verdict or before.verdict, one.outcome or before.outcome)
        found[one.verdict_id] = one
    return [found[name] for name in sorted(found)]


def _decoded(kind: type[RecordType], items: Mapping[str, bytes], unreadable: list[str]) -> dict[str, RecordType]:
    found: dict[str, RecordType] = {}
    for name, value in items.items():
        try:
            found[name] = decode(kind, value, name)
        except CoordinationError as error:
            unreadable.append(str(error))
    return found
