"""Classifies the failures of a round by the ends of all its logs, for the views of logs and of incidents."""

from __future__ import annotations

from megatrain_diagnostics.analysis.log_search import LogFinding, classify_logs
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.store.log_query import newest_tails
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_job.failures.culprit import Culprit

_MAX_LINES = 50_000
"""The most lines that are classified. If each of them reports a failure, classifying them takes seven seconds."""


def classified_round(
    events: StoredEvents, roster: Roster | None, round_number: int, culprit: Culprit | None, budget_s: float
) -> LogFinding:
    """Return the failures in the newest lines of each rank. `culprit`: as an incident names it.

    Raises: DataError; TooSlowError where reading the lines takes longer than `budget_s`.
    """
    num_ranks = 1 if roster is None else roster.layout.world_size
    tails = newest_tails(events, Where((round_number,)), _MAX_LINES, num_ranks=num_ranks, budget_s=budget_s)
    return classify_logs(tails, roster, culprit)
