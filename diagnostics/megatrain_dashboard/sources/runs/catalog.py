"""All jobs: the run directories below one directory, and the jobs of an etcd. A thread keeps them up to date.

A run directory is read again when one of its files has changed. The etcd of a job whose launch holds its lock is
queried at each poll, a few at a time and for at most a second each. After a poll that took long, the pause is twice as
long as the poll. A request can name only a listed entry, so it reaches no other directory. Symbolic links are not
followed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatrain.contracts.natural_order import natural_order
from megatrain.formatting import count_text, names_text, printable
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.sources.protocol import LiveState
from megatrain_dashboard.sources.runs.etcd_polls import (
    EtcdAccess,
    PolledJob,
    SharedEtcd,
    own_etcd_access,
    with_short_timeouts,
)
from megatrain_dashboard.sources.runs.job_seen import JobSeen
from megatrain_dashboard.sources.runs.run_summary import RunSummary, Signature, read_run_summary, signature_of
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.jobs.etcd_job import EtcdPoll
from megatrain_job.jobs.run_state import RunKind, read_facts

_logger = logging.getLogger(__name__)
PERIOD_S = 2.0
_PART_BUSY = 2.0
"""After a poll that took long, the pause is this many times its length."""
_NUM_CALLS = 8
_MAX_RUNS = 5000
_OF_ETCD = "etcd:"
"""A prefix for names of jobs without a directory among the runs, so that the name never equals a directory's."""


@dataclass(frozen=True, slots=True)
class CatalogPoll:
    """All jobs at a moment, by name."""

    jobs: Mapping[str, JobSeen] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """One sentence for each problem that may hide jobs."""
    took_s: float = 0.0


class JobCatalog:
    """Watches all jobs until `close`. The first poll is over when the constructor returns."""

    def __init__(
        self,
        runs: Path | None,
        etcd: EtcdSettings | None = None,
        *,
        clock: Callable[[], float] = time.time,
        period_s: float = PERIOD_S,
    ) -> None:
        """`runs`: the directory of run directories. `etcd`: an etcd whose jobs are listed too."""
        self.runs, self._period_s = runs, period_s
        self._summaries: dict[Path, tuple[Signature, RunSummary]] = {}
        self._own: dict[EtcdAccess, PolledJob] = {}
        self._pool = ThreadPoolExecutor(_NUM_CALLS, thread_name_prefix="etcd of a job")
        self._shared = None if etcd is None else SharedEtcd(etcd, self._pool, clock)
        self._clock = clock
        self._number = 1
        self._last_poll = self._poll_once()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll_on, name="catalog of jobs", daemon=True)
        self._thread.start()

    def last_poll(self) -> CatalogPoll:
        """Return all jobs as they were seen last."""
        return self._last_poll

    def live(self) -> LiveState:
        """Return the state for /live: a number that grows when something has changed."""
        return LiveState(None, {"jobs": self._number})

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        for job in self._own.values():
            job.client.close()
        if self._shared is not None:
            self._shared.close()

    def _poll_on(self) -> None:
        last_error = ""
        while not self._closed.wait(max(self._period_s, self._last_poll.took_s * _PART_BUSY)):
            try:
                poll = self._poll_once()
                last_error = ""
            except Exception as error:
                # after a bug the polls continue, and the log must not fill up
                if repr(error) != last_error:
                    _logger.exception("the jobs could not be read")
                last_error = repr(error)
                continue
            has_news = poll.jobs != self._last_poll.jobs or poll.problems != self._last_poll.problems
            self._last_poll = poll
            self._number += has_news

    def _poll_once(self) -> CatalogPoll:
        began_s = time.monotonic()
        roots, problems = listed_runs(self.runs)
        seen = {root.name: JobSeen(root.name, self._summary(root)) for root in roots}
        seen.update(self._asked(seen))
        elsewhere: set[Path] = set()
        if self._shared is not None:
            polls, problem = self._shared.poll_all()
            problems = (*problems, *filter(None, [problem]))
            for access, poll in polls.items():
                job = self._of_etcd(seen, access, poll)
                seen[job.name] = job
                elsewhere |= {job.summary.root} if job.summary is not None else set()
        self._summaries = {root: known for root, known in self._summaries.items() if root in elsewhere or root in roots}
        return CatalogPoll(seen, problems, time.monotonic() - began_s)

    def _summary(self, root: Path) -> RunSummary:
        """Return the summary of a directory. It is read again where files changed, or where the job's lock changed."""
        signature, known = signature_of(root), self._summaries.get(root)
        if known is not None and known[0] == signature and known[1].run_state.kind in (RunKind.ENDED, RunKind.KILLED):
            return known[1]
        if known is not None and known[0] == signature and read_facts(root) == known[1].facts:
            return known[1]
        summary = read_run_summary(root)
        self._summaries[root] = (signature, summary)
        return summary

    def _asked(self, seen: Mapping[str, JobSeen]) -> dict[str, JobSeen]:
        """Return the jobs that have their own etcd, with their current state in it."""
        accesses = {name: access for name, job in seen.items() if (access := own_etcd_access(job.summary)) is not None}
        for access in set(self._own) - set(accesses.values()):
            self._own.pop(access).client.close()
        for access in accesses.values():
            if access not in self._own:
                self._own[access] = PolledJob(access, EtcdClient(with_short_timeouts(access.settings)), self._clock)
        polls = self._pool.map(lambda access: self._own[access].poll(), accesses.values())
        return {
            name: replace(seen[name], poll=poll, access=access)
            for (name, access), poll in zip(accesses.items(), polls, strict=True)
        }

    def _of_etcd(self, seen: Mapping[str, JobSeen], access: EtcdAccess, poll: EtcdPoll) -> JobSeen:
        """Return a job of the shared etcd, joined with its directory if that is among the runs."""
        record = None if poll.snapshot is None else poll.snapshot.record
        root = None if record is None else Path(record.run_directory)
        if root is not None and self.runs is not None and root.name in seen and _is_same(root, self.runs / root.name):
            return replace(seen[root.name], poll=poll, access=access)
        summary = self._summary(root) if root is not None and root.is_dir() else None
        return JobSeen(f"{_OF_ETCD}{access.job}", summary, poll, access)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def listed_runs(runs: Path | None) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the run directories below a directory, by name, and the problems with other entries."""
    found, links = [], []
    try:
        with os.scandir(runs) if runs is not None else nullcontext(()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    links.append(entry.name)
                elif entry.is_dir(follow_symlinks=False) and _is_run(Path(entry.path)):
                    found.append(Path(entry.path))
    except OSError as error:
        return (), (f"{runs}: cannot be read: {error.strerror}",)
    found.sort(key=lambda root: natural_order(root.name))
    problems = []
    if links:
        names = names_text(sorted(links), 4)
        problems.append(f"symbolic links are not followed: {names}; name the directory that they point to with --runs")
    if len(found) > _MAX_RUNS:
        problems.append(f"there are {count_text(len(found), 'run')}; only the first {_MAX_RUNS:,} are listed")
    return tuple(found[:_MAX_RUNS]), tuple(printable(text) for text in problems)


def _is_run(root: Path) -> bool:
    """Return whether a directory contains a file or folder of a run; True if listing it is not permitted."""
    own = RunDirectory(root)
    try:
        return any(own.owns(name) for name in os.listdir(root))
    except PermissionError:
        return True
    except OSError:
        return False
