"""Which tests one process runs when several run side by side (`pytest -n`)."""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling

SHARED_JOBS = (
    "tests/faults/outages/test_etcd_outages.py",
    "tests/faults/outages/test_network_outages.py",
    "tests/faults/programs/test_every_fault_reported.py",
)
"""The files whose tests use one launched job after the other (fixture `shared_jobs`)."""
_LAUNCHED, _RANKS, _TREES = "tests/faults/", "tests/dist/", "tests/unit/conventions/"
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

    So do all that use the pool of ranks, of which there is one a session, and all that read the syntax trees of all
    files, which are made once a process. Tests of launched jobs take long and share nothing, but for those of
    SHARED_JOBS: each is alone.
    """
    file = nodeid.split("::", 1)[0]
    shared = next((directory for directory in (_RANKS, _TREES) if file.startswith(directory)), None)
    if shared is not None:
        return shared
    return nodeid if file.startswith(_LAUNCHED) and file not in SHARED_JOBS else file
