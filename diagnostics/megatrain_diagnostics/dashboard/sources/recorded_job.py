"""The history of a run, from its directory alone: a job that is over, or whose etcd is not in reach."""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.run_directory import RunDirectory
from megatrain.jobs.snapshot import JobSnapshot
from megatrain.jobs.verdict_cases import cases_of_audit
from megatrain_diagnostics.dashboard.sources.facts import JobFacts
from megatrain_diagnostics.dashboard.sources.run_files import recorded_config, recorded_exit_code
from megatrain_diagnostics.dashboard.sources.run_source import RunSource, checkpoints_place


class RecordedJob(RunSource):
    """A JobSource. Opened by its constructor; `close` ends its threads."""

    def __init__(self, run: RunDirectory) -> None:
        self._config = recorded_config(run)
        self._exit_code = recorded_exit_code(run)
        place = checkpoints_place(self._config, run)
        if "://" not in place and not Path(place).is_dir():
            place = str(run.checkpoints)  # the run was copied here from where it was made
        super().__init__(run, lambda: place, is_over=True)

    @property
    def job(self) -> str:
        state = self._history.state
        if self._config is not None:
            return self._config.job.name
        return state.job if state is not None else self._run.root.resolve().name

    @property
    def is_recorded(self) -> bool:
        return True

    def snapshot(self) -> JobSnapshot | None:
        return None

    def etcd_trouble(self) -> str:
        return ""

    def facts(self) -> JobFacts:
        history = self._history
        return JobFacts(
            incidents=history.files.incidents,
            cases=tuple(cases_of_audit(history.files.entries)),
            config=self._config,
            exit_code=self._exit_code,
            incarnations=history.incarnations,
            series=history.series,
            checkpoints=history.checkpoints,
            problems=history.problems(),
        )

    def has_looked(self) -> bool:
        """Return whether all that is there has been read once."""
        return self._history.has_looked.is_set()
