"""Which tests one process runs when several run side by side (`pytest -n`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.helpers.source_tree import ROOT

SHARED_JOBS = (
    "tests/faults/outages/test_etcd_outages.py",
    "tests/faults/outages/test_network_outages.py",
    "tests/faults/programs/test_every_fault_reported.py",
)
"""The files whose tests use one launched job after the other (fixture `shared_jobs`)."""
_LAUNCHED, _RANKS, _TREES = "tests/faults/", "tests/dist/", "tests/unit/conventions/"
_FORKING = ("forked_program", "run_forked", "writer_process", "crash_at", "executor_process", "forked_launch")
"""A file that names one of these starts processes from the fork server, which takes seconds to load torch."""
_ENOUGH_TESTS = 2
"""A process begins a test when it knows the next one."""


class SharedFixtureScheduling(LoadScopeScheduling):
    """Gives each process that is free the next tests that belong together."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        of_others = (scope for other, work in self.assigned_work.items() if other is not node for scope in work)
        scope = next_scope(list(self.workqueue), self.assigned_work[node], of_others)
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        # the base class keeps a test more in store; here another process may be free before
        if self._pending_of(self.assigned_work[node]) < _ENOUGH_TESTS or node.shutting_down:
            super()._reschedule(node)


def scope_of(nodeid: str) -> str:
    """Return the name of the tests that stay together: usually those of a file.

    So do all that read the syntax trees of all files, which are made once a process. Tests of launched jobs take long
    and share nothing, but for those of SHARED_JOBS: each is alone.
    """
    file = nodeid.split("::", 1)[0]
    if file.startswith(_LAUNCHED):
        return file if file in SHARED_JOBS else nodeid
    return _TREES if file.startswith(_TREES) else file


def next_scope(waiting: Sequence[str], own: Iterable[str], of_others: Iterable[str]) -> str:
    """Return which of the waiting scopes a process runs next.

    own, of_others: the scopes that this process and the other ones were given before. Of ranks and of the fork server
    there is one a process, so one process runs the tests that use them. Others take some only when nothing else waits.
    """
    if any(map(_uses_fork_server, own)):
        preferred = [scope for scope in waiting if _uses_fork_server(scope)]
    elif any(map(_uses_fork_server, of_others)):
        preferred = [scope for scope in waiting if not _uses_fork_server(scope)]
    else:
        preferred = []
    return (preferred or waiting)[0]


@cache
def _uses_fork_server(scope: str) -> bool:
    """Return whether the tests of a scope use the ranks or the fork server of their process; not launched jobs, all of
    which would."""
    if scope.startswith(_LAUNCHED) or scope == _TREES:
        return False
    if scope.startswith(_RANKS):
        return True
    text = (ROOT / scope).read_text(encoding="utf-8")
    return any(name in text for name in _FORKING)
