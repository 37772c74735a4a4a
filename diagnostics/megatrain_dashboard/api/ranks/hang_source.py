"""The evidence of a hang: kept files of a broken round, reports of executors in etcd, or spans.

Open spans are read only where an executor or an incident reports that a round makes no progress: in a job that trains,
open spans prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.contracts.errors import DataError
from megatrain.contracts.records.incident import IncidentKind
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.analysis.hang import RankActivity
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Spans
from megatrain_diagnostics.store.hang_answer import HangAnswer, answer_of_evidence, answer_of_spans
from megatrain_diagnostics.store.hang_evidence import executors_evidence
from megatrain_diagnostics.store.rounds_and_hosts import steps_ahead
from megatrain_job.failures.culprit import recorded_culprit
from megatrain_job.jobs.snapshot import JobSnapshot

_NEWEST_STEPS = 2


def hang_of(source: JobSource, round_number: int) -> HangAnswer | None:
    """Return the ranks that block a round, or blocked it when it ended; None where nothing reports a hang.

    Raises: DataError where the kept evidence cannot be read.
    """
    facts = source.facts()
    recorded = recorded_culprit(facts.incidents, round_number)
    kept = source.kept_evidence(round_number)
    if kept is not None:
        return answer_of_evidence(kept, f"files kept of round {round_number}", source.events, recorded)
    evidence = [item for item in facts.evidence if item.round == round_number]
    if evidence:
        return answer_of_evidence(
            executors_evidence(round_number, evidence), "reports of executors", source.events, recorded
        )
    is_hang = any(incident.kind is IncidentKind.HANG and incident.round == round_number for incident in facts.incidents)
    if not is_hang and not _is_stalled(source.snapshot(), round_number):
        return None
    ahead = steps_ahead(source.events, Spans, Where((round_number,)))
    first = None if ahead is None else max(0, ahead.last - _NEWEST_STEPS)
    return answer_of_spans(source.events, source.roster(round_number), recorded, first_step=first)


def _is_stalled(snapshot: JobSnapshot | None, round_number: int) -> bool:
    if snapshot is None or snapshot.newest_round is None or snapshot.newest_round.number != round_number:
        return False
    return any(status.stall is not None and status.round == round_number for status in snapshot.statuses.values())


def activities_of(source: JobSource, round_number: int) -> Mapping[int, RankActivity]:
    """Return the positions of ranks from black boxes, else from executors; empty where the round has neither."""
    try:
        kept = source.kept_evidence(round_number)
    except DataError:
        return {}
    if kept is not None:
        return kept.activities
    evidence = [item for item in source.facts().evidence if item.round == round_number]
    return executors_evidence(round_number, evidence).activities if evidence else {}
