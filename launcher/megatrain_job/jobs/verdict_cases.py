"""Verdicts with the driver's outcomes: from etcd, or from the audit that the driver writes to disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_verdict import AuditEntry, HostVerdict, VerdictOutcome
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import RecordType, decode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.wire import KeyRange, Range


@dataclass(frozen=True, slots=True)
class VerdictWithOutcome:
    """A verdict and its newest outcome; one of them may be missing, or unreadable."""

    verdict_id: str
    verdict: HostVerdict | None
    outcome: VerdictOutcome | None


def read_cases(client: EtcdClient, keys: JobKeys) -> tuple[list[VerdictWithOutcome], list[str]]:
    """Return the verdicts in etcd, oldest first, and the problems of unreadable records, which are left out.

    Raises: CoordinationError.
    """
    prefixes = [keys.directory(name) for name in ("verdicts", "outcomes")]
    responses = client.read_together([Range(KeyRange.prefix(prefix)) for prefix in prefixes])
    raw = [
        {item.key.decode(errors="replace").removeprefix(prefix): item.value for item in response.items}
        for prefix, response in zip(prefixes, responses, strict=True)
    ]
    unreadable: list[str] = []
    verdicts = _decoded(HostVerdict, raw[0], unreadable)
    outcomes = _decoded(VerdictOutcome, raw[1], unreadable)
    names = sorted(verdicts.keys() | outcomes.keys())
    return [VerdictWithOutcome(name, verdicts.get(name), outcomes.get(name)) for name in names], unreadable


def cases_of_audit(entries: Iterable[AuditEntry]) -> list[VerdictWithOutcome]:
    """Return the verdicts in an audit with their outcomes, oldest first."""
    # a verdict that waited has two outcomes: the last one counts
    newest = {
        entry.outcome.verdict_id: VerdictWithOutcome(entry.outcome.verdict_id, entry.verdict, entry.outcome)
        for entry in entries
    }
    return [newest[name] for name in sorted(newest)]


def merged_cases(
    of_disk: Iterable[VerdictWithOutcome], of_etcd: Iterable[VerdictWithOutcome]
) -> list[VerdictWithOutcome]:
    """Return the verdicts of both sources, oldest first. For a verdict in both, etcd's parts take precedence."""
    found = {case.verdict_id: case for case in of_disk}
    for case in of_etcd:
        before = found.get(case.verdict_id)
        if before is not None:
            case = VerdictWithOutcome(case.verdict_id, case.verdict or before.verdict, case.outcome or before.outcome)
        found[case.verdict_id] = case
    return [found[name] for name in sorted(found)]


def _decoded(kind: type[RecordType], items: Mapping[str, bytes], unreadable: list[str]) -> dict[str, RecordType]:
    found: dict[str, RecordType] = {}
    for name, value in items.items():
        try:
            found[name] = decode(kind, value, name)
        except CoordinationError as error:
            unreadable.append(str(error))
    return found
