"""The history of a run, from its directory only: a job that is over, or whose etcd is unreachable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatrain.config.config import Config
from megatrain.formatting import printable
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.run_files import read_config
from megatrain_dashboard.sources.run_source import RunSource, checkpoints_place
from megatrain_dashboard.sources.runs.run_summary import read_run_summary
from megatrain_job.jobs.snapshot import JobSnapshot


class RecordedJob(RunSource):
    """A JobSource. The constructor opens it; `close` ends its threads."""

    def __init__(self, run: RunDirectory) -> None:
        self._config, config_problem = read_config(run)
        self._summary = read_run_summary(run.root)
        place, place_problem = _own_checkpoints(self._config, run)
        self._problems = tuple(printable(text) for text in (config_problem, place_problem) if text)
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

    @property
    def etcd_endpoints(self) -> str:
        return ""

    def snapshot(self) -> JobSnapshot | None:
        return None

    def etcd_problem(self) -> str:
        return ""

    def facts(self) -> JobFacts:
        found = super().facts()
        return replace(
            found,
            config=self._config,
            run_state=self._summary.run_state,
            reported_step=self._summary.outline.last_step,
            problems=(*found.problems, *self._problems),
        )

    def wait_for_poll(self, most_s: float) -> bool:
        """Wait until everything has been read once, because pages get no notification later."""
        return self._history.wait_for_poll(most_s)


def _own_checkpoints(config: Config | None, run: RunDirectory) -> tuple[str, str]:
    """Return the place of a run's checkpoints below its directory, and a problem if the configured place is elsewhere.

    Opening a run directory of another user must not make the dashboard query a server or read a place that the
    configuration there names.
    """
    own = str(run.checkpoints)
    named = checkpoints_place(config, run)
    if "://" not in named:
        place = Path(named)
        if named == own or place.resolve().is_relative_to(run.root.resolve()):
            return named, ""
        if not place.is_dir():
            return own, ""  # the run was copied here from the place where it was made
    return own, (
        f"checkpoint.directory={printable(named)!r} is outside of the run directory: the history of a run shows only "
        "checkpoints below it"
    )
