"""The routes of pictures over a directory of events, without a job: they get exactly what they need of a source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.testclient import TestClient

from megatrain.config.config import Config
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.errors import add_error_responses, check_query
from megatrain_dashboard.responses.heavy import HeavyQueries
from megatrain_dashboard.settings import DashboardSettings
from megatrain_dashboard.sources.facts import JobFacts
from megatrain_dashboard.sources.protocol import LiveState
from megatrain_dashboard.sources.run_history import TOPICS
from megatrain_diagnostics.columns.schema import to_arrow
from megatrain_diagnostics.events.roster import Roster, make_roster, newest_round
from megatrain_diagnostics.events.source import Where
from megatrain_diagnostics.events.tables import Groups, Ranks, Table
from megatrain_diagnostics.store.hang_evidence import FiledEvidence
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segment_store import SegmentStore


@dataclass
class PictureSource:
    """A recorded job, as far as pictures need it. Changing `versions` announces new events."""

    directory: Path
    evidence: FiledEvidence | None = None
    state: Any = None
    config: Config | None = None
    versions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 0))

    def __post_init__(self) -> None:
        self.job = "made"
        self.run = RunDirectory(self.directory)
        self.is_recorded = True
        self.etcd_endpoints = ""
        self.events = StoredEvents(self.directory / "events")
        self._rosters: dict[int, Roster] = {}

    def snapshot(self) -> None:
        return None

    def etcd_problem(self) -> str:
        return ""

    def daemon_state(self) -> Any:
        return self.state

    def facts(self) -> JobFacts:
        return JobFacts(config=self.config)

    def kept_evidence(self, round_number: int) -> FiledEvidence | None:
        return self.evidence

    def roster(self, round_number: int | None) -> Roster:
        number = newest_round(self.events.read(Ranks)) if round_number is None else round_number
        if number not in self._rosters:
            where = Where((number,))
            self._rosters[number] = make_roster(self.events.read(Ranks, where), self.events.read(Groups, where), number)
        return self._rosters[number]

    def live(self) -> LiveState:
        return LiveState(None, self.versions)

    def close(self) -> None:
        return None


def stored_events(directory: Path, *tables: Table) -> Path:
    """Write tables as the events of a run."""
    with SegmentStore(directory / "events") as store:
        for table in tables:
            store.append(type(table), to_arrow(table))
        store.commit()
    return directory


def picture_client(
    source: PictureSource, router: Callable[[DashboardParts], APIRouter], *, num_downloads: int = 1
) -> TestClient:
    """Return a client of one router, with the server's error responses."""
    downloads = HeavyQueries(num_running=num_downloads, num_waiting=0)
    app = FastAPI(dependencies=[Depends(check_query)])
    add_error_responses(app)
    app.include_router(router(DashboardParts(source, settings=DashboardSettings(), downloads=downloads)))  # type: ignore[arg-type]
    return TestClient(app)
