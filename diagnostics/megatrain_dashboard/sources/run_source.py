"""The part that both sources of a job share: its run directory, with events and history."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.config.config import Config
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.protocol import LiveState
from megatrain_dashboard.sources.run_history import PERIOD_S, RunHistory, Versions
from megatrain_dashboard.sources.series_builder import SeriesSnapshot
from megatrain_dashboard.sources.series_detail import SeriesDetail
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.daemon_state import DaemonState
from megatrain_diagnostics.store.hang_evidence import FiledEvidence
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_job.jobs.verdict_cases import cases_of_audit

MEMORY_BYTES = 10**9
"""Memory that DuckDB may use for one query; it frees all of it afterwards."""


class RunSource:
    """The part of a JobSource that reads a run directory. Its threads start in the constructor."""

    def __init__(
        self,
        run: RunDirectory,
        checkpoints: Callable[[], str],
        *,
        is_over: bool,
        period_s: float = PERIOD_S,
    ) -> None:
        """`checkpoints`: returns the location of the checkpoints. `is_over`: nothing will be written any more."""
        self._run = run
        self._versions = Versions()
        self._events = StoredEvents(run.events, memory_limit_bytes=MEMORY_BYTES)
        self._detail = SeriesDetail(self._events)
        self._history = RunHistory(run, self._events, self._versions, checkpoints, is_over=is_over, period_s=period_s)

    @property
    def run(self) -> RunDirectory:
        return self._run

    @property
    def events(self) -> StoredEvents:
        return self._events

    def facts(self) -> JobFacts:
        """Return the facts in the run directory."""
        history = self._history
        return JobFacts(
            incidents=history.files.incidents,
            damaged_incidents=history.files.damaged,
            cases=tuple(cases_of_audit(history.files.entries)),
            rounds=history.rounds,
            series=history.series,
            checkpoints=history.checkpoints,
            notes=history.files.notes,
            changes=history.files.changes,
            problems=history.problems(),
        )

    def daemon_state(self) -> DaemonState | None:
        return self._history.state

    def series_part(self, first: int | None, last: int | None) -> SeriesSnapshot:
        whole = self._history.series
        if first is None or last is None:
            return whole.between(first, last)
        return self._detail.part(whole, self._history.rounds, first, last)

    def roster(self, round_number: int | None) -> Roster:
        return self._history.roster(round_number)

    def kept_evidence(self, round_number: int) -> FiledEvidence | None:
        return self._history.kept_evidence(round_number)

    def live(self) -> LiveState:
        series = self._history.series
        return LiveState(int(series.column("last")[-1]) + 1 if len(series) else None, self._versions.now())

    def close(self) -> None:
        self._history.close()


def checkpoints_place(config: Config | None, run: RunDirectory) -> str:
    """Return the path or URL of a run's checkpoints."""
    named = "" if config is None else config.checkpoint.directory
    return named or str(run.checkpoints)
