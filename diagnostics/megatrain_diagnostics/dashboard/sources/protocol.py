"""What the routes ask of a job, whether it lives (etcd and run directory) or is over (run directory alone).

All of it answers at once, from any thread: what has to be fetched, a thread of the source's own fetches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatrain.contracts.run_directory import RunDirectory
from megatrain.jobs.snapshot import JobSnapshot
from megatrain_diagnostics.dashboard.sources.facts import JobFacts
from megatrain_diagnostics.dashboard.sources.series_book import SeriesSnapshot
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.hang_evidence import FiledEvidence
from megatrain_diagnostics.store.reader import StoredEvents

if TYPE_CHECKING:
    from megatrain_diagnostics.store.daemon_state import DaemonState


@dataclass(frozen=True, slots=True)
class LiveState:
    """What is new, for the stream of /live: by view a number that grows when its answer may have changed."""

    step: int | None
    versions: Mapping[str, int]


class JobSource(Protocol):
    """Where the answers about one job come from."""

    @property
    def job(self) -> str:
        """The job's name."""

    @property
    def run(self) -> RunDirectory: ...

    @property
    def is_recorded(self) -> bool:
        """The history of a run, without its etcd: nothing changes and nothing can be asked for."""

    @property
    def etcd_endpoints(self) -> str:
        """Where its etcd is, as command lines name it; empty for a recorded job."""

    @property
    def events(self) -> StoredEvents: ...

    def snapshot(self) -> JobSnapshot | None:
        """Return the last snapshot of the job from etcd, a second old at most while etcd is in reach.

        None: the job is recorded, or etcd has not answered yet.
        """

    def etcd_trouble(self) -> str:
        """Return why etcd does not answer; empty while it does, and for a recorded job."""

    def daemon_state(self) -> DaemonState | None:
        """Return what the diagnostics daemon tells in <run>/diagnosis/state.json; None where it never did."""

    def facts(self) -> JobFacts:
        """Return what is known beside the snapshot: records, the series of steps, checkpoints."""

    def series_part(self, first: int | None, last: int | None) -> SeriesSnapshot:
        """Return the steps from `first` to `last`, each by itself where they are few enough; None: no bound."""

    def roster(self, round_number: int | None) -> Roster:
        """Return who the ranks of a round are; None: the one that is shown.

        Raises: DataError where nothing is known of it, with what there is.
        """

    def kept_evidence(self, round_number: int) -> FiledEvidence | None:
        """Return what is kept of a broken round; None where nothing is.

        Raises: DataError where none of it can be read.
        """

    def live(self) -> LiveState:
        """Return which views have something new."""

    def close(self) -> None:
        """End the threads of the source. What it was asked before stays valid."""
