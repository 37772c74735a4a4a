"""Which tests one process runs when several run side by side (`pytest -n`)."""

from __future__ import annotations

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
_POOLS = 2
"""How many processes have a pool of ranks: while the ranks of one start or wait, the other's compute."""
_RANKS_FILES = sorted(f"{_RANKS}{path.name}" for path in (ROOT / _RANKS).glob("test_*.py"))
_ENOUGH_TESTS = 2
"""A process begins a test when it knows the next one."""


class SharedFixtureScheduling(LoadScopeScheduling):
    """Gives each process that is free the next tests that belong together."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _reschedule(self, node: Any) -> None:
        # the base class keeps a test more in store; here another process may be free before
        if self._pending_of(self.assigned_work[node]) < _ENOUGH_TESTS or node.shutting_down:
            super()._reschedule(node)


def scope_of(nodeid: str) -> str:
    """Return the name of the tests that stay together: usually those of a file.

    So do all that use the same pool of ranks, of which a process has one, and all that read the syntax trees of all
    files, which are made once a process. Tests of launched jobs take long and share nothing, but for those of
    SHARED_JOBS: each is alone.
    """
    file = nodeid.split("::", 1)[0]
    if file.startswith(_RANKS):
        return f"{_RANKS}{_RANKS_FILES.index(file) % _POOLS}"
    if file.startswith(_TREES):
        return _TREES
    return nodeid if file.startswith(_LAUNCHED) and file not in SHARED_JOBS else file
