"""Finds the ranks that hold up a job, from the available evidence: kept records of a broken round, or else spans, and
stack dumps."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.flight_recorder import Disagreement
from megatrain_diagnostics.analysis.hang import HangFinding, activities_of_spans, find_hang, roster_groups
from megatrain_diagnostics.analysis.hang_grid import rank_letters
from megatrain_diagnostics.analysis.stack_clusters import StackFinding, find_outliers, newest_main_stacks
from megatrain_diagnostics.events.roster import Roster, make_roster
from megatrain_diagnostics.events.source import EventSource, Where
from megatrain_diagnostics.events.tables import Groups, Ranks, Spans, Stacks
from megatrain_diagnostics.store.hang_evidence import FiledEvidence
from megatrain_job.failures.culprit import Culprit


@dataclass(frozen=True, slots=True)
class HangAnswer:
    """The ranks that hold up the job, the roster, and the evidence used."""

    source: str
    roster: Roster
    finding: HangFinding
    stacks: StackFinding
    disagreements: tuple[Disagreement, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def letters(self) -> str:
        suspects = [suspect.rank for suspect in self.finding.suspects]
        return rank_letters(
            self.roster.layout, suspects, self.stacks.outliers, self.finding.silent, self.finding.waiting
        )


def answer_of_evidence(
    filed: FiledEvidence,
    place: str,
    source: EventSource | None,
    recorded: Culprit | None,
    stacks: StackFinding | None = None,
) -> HangAnswer:
    """Return the answer from files, or from the executors' evidence.

    `place`: the source to name in the answer. `stacks`: None: use the stacks in the events. `recorded`: the culprit in
    this round's incident, here and below.
    """
    roster = evidence_roster(filed, source)
    finding = find_hang(filed.activities, {**filed.groups}, roster, filed.silent, recorded)
    return HangAnswer(place, roster, finding, stacks or stacks_of(source, roster), (), filed.problems)


def answer_of_spans(
    source: EventSource, roster: Roster, recorded: Culprit | None, *, first_step: int | None = None
) -> HangAnswer:
    """Return the answer from the spans of a round, starting at `first_step`."""
    spans = source.read(Spans, Where((roster.round,), first_step))
    finding = find_hang(activities_of_spans(spans, roster), roster_groups(roster), roster, recorded=recorded)
    return HangAnswer("spans", roster, finding, stacks_of(source, roster), (), source.problems())


def evidence_roster(filed: FiledEvidence, source: EventSource | None) -> Roster:
    """Return the roster for evidence: from its files, or else from events, or else with rank numbers only."""
    return filed.roster or roster_of_events(source, filed.round) or _flat_roster(filed)


def roster_of_events(source: EventSource | None, round_number: int | None) -> Roster | None:
    """Return the roster of a round, None if events do not have it; `round_number` None: the newest round."""
    if source is None:
        return None
    ranks = source.read(Ranks)
    number = round_number if round_number is not None else int(max(ranks.round, default=-1))
    if number not in ranks.round:
        return None
    return make_roster(ranks, source.read(Groups, Where(rounds=(number,))), number)


def stacks_of(source: EventSource | None, roster: Roster) -> StackFinding:
    """Return the newest stacks in the events, clustered, with the outliers."""
    if source is None:
        return find_outliers({}, roster)
    stacks = source.read(Stacks, Where(rounds=(roster.round,)))
    return find_outliers(newest_main_stacks(stacks, roster.round), roster)


def _flat_roster(filed: FiledEvidence) -> Roster:
    """Return a roster in which all ranks are data-parallel replicas, for evidence without a layout."""
    known = {*filed.activities, *filed.silent, *(rank for ranks in filed.groups.values() for rank in ranks)}
    return Roster(filed.round, Layout(dp_size=1 + max(known, default=0)), {}, {})
