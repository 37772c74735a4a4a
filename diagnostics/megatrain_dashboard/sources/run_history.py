"""The contents of a run directory: records, rounds, the series of steps, the daemon's state. A thread updates them.

Each second the thread checks for changes by the times of files and of the newest hour of each table. It reads only what
has changed, and only the new part of the series. It keeps the series (2 MB), the newest 2,000 incidents, the
daemon's state, and the rosters of four rounds (12,288 ranks: 6 MB each) in memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain.formatting import printable
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.sources.checkpoint_watch import CheckpointWatch
from megatrain_dashboard.sources.facts import CheckpointsSeen
from megatrain_dashboard.sources.run_files import RunFiles
from megatrain_dashboard.sources.series_builder import EMPTY, SeriesBuilder, SeriesSnapshot
from megatrain_dashboard.sources.series_reader import SeriesReader
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import TABLES
from megatrain_diagnostics.store.daemon_state import STATE_NAME, DaemonState, read_state
from megatrain_diagnostics.store.hang_evidence import FiledEvidence, kept_rounds, read_incident
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.rounds_and_hosts import (
    RoundSeen,
    roster_of,
    rounds_seen,
    shown_round,
)

_logger = logging.getLogger(__name__)
PERIOD_S = 1.0
_WARNING_PAUSE_S = 60.0
_MAX_ROSTERS = 4
_MAX_KEPT = 2
_MAX_PROBLEMS = 50
_TOPICS_OF = {
    "spans": ("timeline", "stragglers", "ranks"),
    "totals": ("heat", "stragglers"),
    "values": ("heat",),
    "ranks": ("ranks", "hosts", "heat", "timeline"),
    "groups": ("ranks",),
    "clocks": ("hosts",),
    "logs": ("logs",),
    "stacks": ("ranks",),
    "gpus": ("hosts", "heat"),
    "links": ("hosts", "heat"),
    "xids": ("hosts",),
}
"""By table, the topics that its new rows may change."""
TOPICS = (
    "overview", "series", "heat", "ranks", "stragglers", "incidents", "hosts", "checkpoints", "logs", "timeline",
)  # fmt: skip


class RunHistory:
    """Watches a run directory until `close`. All methods except `close` are thread-safe."""

    def __init__(
        self,
        run: RunDirectory,
        events: StoredEvents,
        versions: Versions,
        checkpoints: Callable[[], str],
        *,
        is_over: bool,
        period_s: float = PERIOD_S,
    ) -> None:
        """`checkpoints`: returns the location of the checkpoints. `is_over`: nothing will be written any more."""
        self._run, self._events, self._versions = run, events, versions
        self._is_over, self._period_s = is_over, period_s
        self.files = RunFiles(run)
        self.state: DaemonState | None = None
        self.rounds: tuple[RoundSeen, ...] = ()
        self.series: SeriesSnapshot = EMPTY
        self.has_polled = threading.Event()
        """Set when everything has been read once."""
        self._builder = SeriesBuilder()
        self._reader = SeriesReader(events, self._builder)
        self._signatures: dict[str, object] = {}
        self._events_problem = self._state_problem = ""
        self._rosters: OrderedDict[int, Roster] = OrderedDict()
        self._kept: OrderedDict[int, tuple[object, FiledEvidence | None]] = OrderedDict()
        self._kept_lock = threading.Lock()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._checkpoints = CheckpointWatch(checkpoints, lambda: versions.bump("checkpoints", "overview"))
        self._thread = threading.Thread(target=self._poll_on, name="history of the run", daemon=True)
        self._thread.start()

    @property
    def checkpoints(self) -> CheckpointsSeen:
        return self._checkpoints.seen

    def wait_for_poll(self, most_s: float) -> bool:
        """Wait until everything, including checkpoints, has been read once. Return whether it has."""
        until_s = time.monotonic() + most_s
        return self.has_polled.wait(most_s) and self._checkpoints.has_polled.wait(max(0.0, until_s - time.monotonic()))

    def problems(self) -> tuple[str, ...]:
        """Return one sentence for each thing that could not be read; at most fifty."""
        own = [text for text in (self._events_problem, self._state_problem, self.checkpoints.problem) if text]
        texts = [*own, *self.files.problems, *self._events.problems()][:_MAX_PROBLEMS]
        return tuple(printable(text) for text in texts)

    def roster(self, round_number: int | None) -> Roster:
        """Return the roster of a round; None: the round that is shown. Raises: DataError."""
        if round_number is None:
            shown = shown_round(self.rounds or rounds_seen(self._events))
            if shown is None:
                raise DataError("no rank has sent anything: nothing was streamed yet, or its events have expired")
            round_number = shown.number
        with self._lock:
            known = self._rosters.get(round_number)
        if known is not None:
            return known
        roster = roster_of(self._events, round_number)
        with self._lock:
            self._rosters[round_number] = roster
            while len(self._rosters) > _MAX_ROSTERS:
                self._rosters.popitem(last=False)
        return roster

    def kept_evidence(self, round_number: int) -> FiledEvidence | None:
        """Return the kept evidence of a broken round: black boxes and the executors' evidence; None: there is none.

        It is read once, and again when its directory has changed. Raises: DataError where none of it can be read.
        """
        directory = kept_rounds(self._run).get(round_number)
        if directory is None:
            return None
        signature = _file_signature(directory)
        with self._kept_lock:  # other requests wait, because this may read thousands of files
            known = self._kept.get(round_number)
            if known is None or known[0] != signature:
                known = (signature, read_incident(self._run, round_number))
                self._kept[round_number] = known
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            return known[1]

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._thread.join()
        self._checkpoints.close()

    def _poll_on(self) -> None:
        has_more, next_warning_s = True, float("-inf")
        while not self._closed.is_set():
            try:
                has_more = self._poll(has_more)
            except Exception:
                # after a bug the polls continue, and the log must not fill up
                has_more = False
                if time.monotonic() >= next_warning_s:
                    next_warning_s = time.monotonic() + _WARNING_PAUSE_S
                    _logger.exception("the run directory could not be read")
            if not has_more:
                self.has_polled.set()
                self._closed.wait(self._period_s)

    def _poll(self, has_more: bool) -> bool:
        """Read what has changed; return whether more steps can be read at once."""
        if self._has_changed("state", _file_signature(self._run.diagnosis / STATE_NAME)):
            self.state, self._state_problem = read_state(self._run.diagnosis)
            self._versions.bump("overview", "stragglers", "ranks", "hosts")
        if self.files.poll():
            self._versions.bump("incidents", "overview", "ranks")
        changed = {
            kind.NAME for kind in TABLES
            if self._has_changed(kind.NAME, _table_signature(self._run.events / kind.NAME))
        }  # fmt: skip
        try:
            if "ranks" in changed or "groups" in changed:
                self._poll_ranks()
            if has_more or changed & {"values", "totals", "ranks"}:
                has_more = self._poll_steps()
            self._events_problem = ""
        except DataError as error:
            self._events_problem, has_more = str(error), False
        topics = {topic for name in changed for topic in _TOPICS_OF[name]}
        if topics:
            self._versions.bump(*topics)
        return has_more

    def _poll_ranks(self) -> None:
        self.rounds = rounds_seen(self._events)
        with self._lock:
            self._rosters.clear()

    def _poll_steps(self) -> bool:
        before = (self._builder.round, self._builder.next_step)
        has_more = self._reader.poll(self.rounds, is_over=self._is_over)
        if before != (self._builder.round, self._builder.next_step):
            self.series = self._builder.snapshot()
            self._versions.bump("series", "overview")
        return has_more

    def _has_changed(self, name: str, signature: object) -> bool:
        is_new = self._signatures.get(name) != signature
        self._signatures[name] = signature
        return is_new


def _file_signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _table_signature(directory: Path) -> tuple[str, int] | None:
    """Return a value that changes when a segment is added to a table: the newest hour's path, and its change time."""
    path = directory
    for _ in range(2):  # the day, the hour
        try:
            newest = max((entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)), default="")
        except OSError:
            return None
        if not newest:
            break
        path = path / newest
    try:
        return str(path), path.stat().st_mtime_ns
    except OSError:
        return None


class Versions:
    """The versions of topics, which /live sends to pages: numbers that grow when responses may have changed.

    A topic is the data of one view, or of a part of one: "series" has the data of the charts, "ranks" the data of the
    view Ranks. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = dict.fromkeys(TOPICS, 1)

    def bump(self, *topics: str) -> None:
        """Raise the versions of some topics."""
        with self._lock:
            for topic in topics:
                self._numbers[topic] += 1

    def now(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._numbers)
