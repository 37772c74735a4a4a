"""All jobs that there are: the run directories below one directory, and the jobs of an etcd, kept fresh by a thread.

A run directory is read again when one of its files has changed; the etcd of a job whose launch holds its lock is asked
at each look, a few at a time and a second each at most. A look that takes long is followed by as long a pause and more. A name
is that of an entry that was listed: no question leads to any other place, and no symbolic link is followed.
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

from megatrain.contracts.printable import printable
from megatrain.contracts.run_directory import RunDirectory
from megatrain.contracts.texts import count_text, names_text, natural_order
from megatrain.coordination.client import EtcdClient
from megatrain.coordination.settings import EtcdSettings
from megatrain.jobs.etcd_job import EtcdLook
from megatrain.jobs.run_standing import RunKind, read_facts
from megatrain.jobs.snapshot import JobSnapshot
from megatrain_diagnostics.dashboard.sources.protocol import LiveState
from megatrain_diagnostics.dashboard.sources.runs.etcd_looks import OneJob, Reach, SharedEtcd, hasty, own_reach
from megatrain_diagnostics.dashboard.sources.runs.glance import RunGlance, Signature, read_glance, signature_of

_logger = logging.getLogger(__name__)
PERIOD_S = 2.0
_PART_BUSY = 2.0
"""After a look that took long so many times its length is waited."""
_NUM_CALLS = 8
_MOST_RUNS = 5000
_OF_ETCD = "etcd:"
"""Before the name of a job of which there is no directory among the runs: no directory is taken for it."""


@dataclass(frozen=True, slots=True)
class JobSeen:
    """A job as it was seen last. `name` is what it is asked for by."""

    name: str
    glance: RunGlance | None = None
    """None: its run directory is not on this machine."""
    look: EtcdLook | None = None
    """None: nothing says that it runs."""
    reach: Reach | None = None

    @property
    def snapshot(self) -> JobSnapshot | None:
        """Its state in etcd, or the last one before etcd went out of reach; None where etcd has no such job."""
        told = None if self.look is None else self.look.snapshot
        return told if told is not None and told.exists else None


@dataclass(frozen=True, slots=True)
class CatalogLook:
    """All jobs at a moment, by name."""

    jobs: Mapping[str, JobSeen] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What hides jobs, a sentence each."""
    took_s: float = 0.0


class JobCatalog:
    """Looks until `close`; the first look is over when its constructor returns."""

    def __init__(
        self,
        runs: Path | None,
        etcd: EtcdSettings | None = None,
        *,
        clock: Callable[[], float] = time.time,
        period_s: float = PERIOD_S,
    ) -> None:
        """`runs`: the directory of run directories; `etcd`: one whose jobs are listed beside them."""
        self.runs, self._period_s = runs, period_s
        self._glances: dict[Path, tuple[Signature, RunGlance]] = {}
        self._own: dict[Reach, OneJob] = {}
        self._pool = ThreadPoolExecutor(_NUM_CALLS, thread_name_prefix="etcd of a job")
        self._shared = None if etcd is None else SharedEtcd(etcd, self._pool, clock)
        self._clock = clock
        self._number = 1
        self._look = self._look_once()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="catalog of jobs", daemon=True)
        self._thread.start()

    def look(self) -> CatalogLook:
        """Return all jobs as they were seen last."""
        return self._look

    def live(self) -> LiveState:
        """Return a number that grows when something has changed."""
        return LiveState(None, {"jobs": self._number})

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        for one in self._own.values():
            one.client.close()
        if self._shared is not None:
            self._shared.close()

    def _look_on(self) -> None:
        complaint = ""
        while not self._closed.wait(max(self._period_s, self._look.took_s * _PART_BUSY)):
            try:
                look = self._look_once()
                complaint = ""
            except Exception as error:
                # a defect of ours must not leave the list with old numbers for ever, nor fill the log
                if repr(error) != complaint:
                    _logger.exception("jobs could not be looked at")
                complaint = repr(error)
                continue
            has_news = look.jobs != self._look.jobs or look.problems != self._look.problems
            self._look = look
            self._number += has_news

    def _look_once(self) -> CatalogLook:
        began_s = time.monotonic()
        roots, problems = listed_runs(self.runs)
        seen = {root.name: JobSeen(root.name, self._glance(root)) for root in roots}
        seen.update(self._asked(seen))
        elsewhere: set[Path] = set()
        if self._shared is not None:
            looks, problem = self._shared.looks()
            problems = (*problems, *filter(None, [problem]))
            for reach, look in looks.items():
                one = self._of_etcd(seen, reach, look)
                seen[one.name] = one
                elsewhere |= {one.glance.root} if one.glance is not None else set()
        self._glances = {root: known for root, known in self._glances.items() if root in elsewhere or root in roots}
        return CatalogLook(seen, problems, time.monotonic() - began_s)

    def _glance(self, root: Path) -> RunGlance:
        """Return what a directory tells, read again where it changed, or where only a lock tells how it is."""
        signature, known = signature_of(root), self._glances.get(root)
        if known is not None and known[0] == signature and known[1].standing.kind in (RunKind.ENDED, RunKind.KILLED):
            return known[1]
        if known is not None and known[0] == signature and read_facts(root) == known[1].facts:
            return known[1]
        glance = read_glance(root)
        self._glances[root] = (signature, glance)
        return glance

    def _asked(self, seen: Mapping[str, JobSeen]) -> dict[str, JobSeen]:
        """Return those that have an etcd of their own, as that tells of them now."""
        reaches = {name: reach for name, one in seen.items() if (reach := own_reach(one.glance)) is not None}
        for reach in set(self._own) - set(reaches.values()):
            self._own.pop(reach).client.close()
        for reach in reaches.values():
            if reach not in self._own:
                self._own[reach] = OneJob(reach, EtcdClient(hasty(reach.settings)), self._clock)
        looks = self._pool.map(lambda reach: self._own[reach].look(), reaches.values())
        return {
            name: replace(seen[name], look=look, reach=reach)
            for (name, reach), look in zip(reaches.items(), looks, strict=True)
        }

    def _of_etcd(self, seen: Mapping[str, JobSeen], reach: Reach, look: EtcdLook) -> JobSeen:
        """Return a job of the shared etcd: with its directory among the runs, or by itself."""
        record = None if look.snapshot is None else look.snapshot.record
        root = None if record is None else Path(record.run_directory)
        if root is not None and self.runs is not None and root.name in seen and _is_same(root, self.runs / root.name):
            return replace(seen[root.name], look=look, reach=reach)
        glance = self._glance(root) if root is not None and root.is_dir() else None
        return JobSeen(f"{_OF_ETCD}{reach.job}", glance, look, reach)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def listed_runs(runs: Path | None) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the run directories below a directory, by name, and what is wrong with others."""
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
        problems.append(f"symbolic links are not followed: {names}; name their place with --runs")
    if len(found) > _MOST_RUNS:
        problems.append(f"{count_text(len(found), 'run')} are there, and the first {_MOST_RUNS:,} are listed")
    return tuple(found[:_MOST_RUNS]), tuple(printable(text) for text in problems)


def _is_run(root: Path) -> bool:
    """Say whether a directory is one that a run wrote; one that cannot be read may be."""
    own = RunDirectory(root)
    try:
        return any(own.owns(name) for name in os.listdir(root))
    except PermissionError:
        return True
    except OSError:
        return False
