"""Which tests one process runs when several run side by side (`pytest -n`)."""

from __future__ import annotations

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
_LAUNCHED, _RANKS, _TREES, _FAMILIES = "tests/faults/", "tests/dist/", "tests/unit/conventions/", "tests/unit/hf/"
_NAMING = {
    _RANKS: ("forked_program", "run_forked", "writer_process", "crash_at", "executor_process", "forked_launch"),
    _FAMILIES: ('lazy_module("transformers', "helpers.huggingface"),
}
"""What stays together -> names: a file with one of them starts processes from the fork server, which takes seconds to
load torch, or loads transformers, which takes seconds in each process."""
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

    So do all that use the pool of ranks or the fork server, of which there is one a process, all that load
    transformers, and all that read the syntax trees of all files, which are made once a process. Tests of launched jobs
    take long and share nothing, but for those of SHARED_JOBS: each is alone.
    """
    file = nodeid.split("::", 1)[0]
    if file.startswith(_LAUNCHED):
        return file if file in SHARED_JOBS else nodeid
    return _scope_of_file(file)


@cache
def _scope_of_file(file: str) -> str:
    if file.startswith((_RANKS, _TREES)):
        return _RANKS if file.startswith(_RANKS) else _TREES
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((scope for scope, names in _NAMING.items() if any(name in text for name in names)), file)
