"""The interface of a job for the routes. A job that is over has only a run directory; a running job also has etcd.

Most methods return at once, from any thread: threads of the source fetch the data beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.series_builder import SeriesSnapshot
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.hang_evidence import FiledEvidence
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_job.jobs.snapshot import JobSnapshot

if TYPE_CHECKING:
    from megatrain_diagnostics.store.daemon_state import DaemonState


@dataclass(frozen=True, slots=True)
class LiveState:
    """State for the stream of /live. `versions`: by topic, a number that grows when its response may have changed."""

    step: int | None
    versions: Mapping[str, int]


class JobSource(Protocol):
    """The source of the responses about one job."""

    @property
    def job(self) -> str:
        """The job's name."""

    @property
    def run(self) -> RunDirectory: ...

    @property
    def is_recorded(self) -> bool:
        """Whether this is the history of a run, without its etcd: nothing changes and no action is possible."""

    @property
    def etcd_endpoints(self) -> str:
        """The endpoints of the job's etcd, as command lines name them; empty for a recorded job."""

    @property
    def events(self) -> StoredEvents: ...

    def snapshot(self) -> JobSnapshot | None:
        """Return the last snapshot of the job from etcd. It is read again within a second of a change.

        If a read takes long, the next one begins after a pause of four times this duration.

        None: the job is recorded, or etcd has not answered yet.
        """

    def etcd_problem(self) -> str:
        """Return why etcd does not answer; empty while it does, and for a recorded job."""

    def daemon_state(self) -> DaemonState | None:
        """Return the diagnostics daemon's state from <run>/diagnosis/state.json; None where there is none."""

    def facts(self) -> JobFacts:
        """Return the data that is not in the snapshot: records, the series of steps, checkpoints."""

    def series_part(self, first: int | None, last: int | None) -> SeriesSnapshot:
        """Return the steps from `first` to `last`, one entry each where they are few enough; None: no bound."""

    def roster(self, round_number: int | None) -> Roster:
        """Return the roster of a round; None: the round that is shown.

        Raises: DataError where nothing is known of the round; the error lists the known rounds.
        """

    def kept_evidence(self, round_number: int) -> FiledEvidence | None:
        """Return the kept evidence of a broken round; None where there is none.

        Raises: DataError where none of it can be read.
        """

    def live(self) -> LiveState:
        """Return the versions of the topics."""

    def close(self) -> None:
        """End the threads of the source. Earlier results stay valid."""
