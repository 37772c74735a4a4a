"""What is known of a hang: from executors through etcd, from what is kept of a broken round, or from spans.

A job that trains has no hang, and its open spans say nothing: they are asked only where the driver, an executor or an
incident says that a round stands still.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.contracts.errors import DataError
from megatrain.contracts.incident import IncidentKind
from megatrain.failures.culprit import recorded_culprit
from megatrain.jobs.snapshot import JobSnapshot
from megatrain_diagnostics.analysis.hang import RankStanding
from megatrain_diagnostics.dashboard.sources.protocol import JobSource
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Spans
from megatrain_diagnostics.store.hang_answer import HangAnswer, answer_of_evidence, answer_of_spans
from megatrain_diagnostics.store.hang_evidence import told_evidence
from megatrain_diagnostics.store.rounds import steps_ahead

_NEWEST_STEPS = 2


def hang_of(source: JobSource, round_number: int) -> HangAnswer | None:
    """Return who holds up a round, or held it up when it ended; None where nothing says that it stood still.

    Raises: DataError where something is kept of it that cannot be read.
    """
    facts = source.facts()
    recorded = recorded_culprit(facts.incidents, round_number)
    kept = source.kept_evidence(round_number)
    if kept is not None:
        return answer_of_evidence(kept, f"what is kept of round {round_number}", source.events, recorded)
    told = [one for one in facts.evidence if one.round == round_number]
    if told:
        return answer_of_evidence(told_evidence(round_number, told), "what executors told", source.events, recorded)
    is_hang = any(one.kind is IncidentKind.HANG and one.round == round_number for one in facts.incidents)
    if not is_hang and not _is_stalled(source.snapshot(), round_number):
        return None
    ahead = steps_ahead(source.events, Spans, Where((round_number,)))
    first = None if ahead is None else max(0, ahead.last - _NEWEST_STEPS)
    return answer_of_spans(source.events, source.roster(round_number), recorded, first_step=first)


def _is_stalled(snapshot: JobSnapshot | None, round_number: int) -> bool:
    if snapshot is None or snapshot.newest_round is None or snapshot.newest_round.number != round_number:
        return False
    return any(status.stall is not None and status.round == round_number for status in snapshot.statuses.values())


def standings_of(source: JobSource, round_number: int) -> Mapping[int, RankStanding]:
    """Return where the ranks stood by black boxes and executors; none of a round of which neither is there."""
    try:
        kept = source.kept_evidence(round_number)
    except DataError:
        return {}
    if kept is not None:
        return kept.standings
    told = [one for one in source.facts().evidence if one.round == round_number]
    return told_evidence(round_number, told).standings if told else {}
