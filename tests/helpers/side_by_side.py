"""The tests that each process runs when several run in parallel (`pytest -n`)."""

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
"""The files whose tests use one launched job one after another (fixture `shared_jobs`)."""
_LAUNCHED, _RANKS, _TREES = "tests/faults/", "tests/dist/", "tests/unit/conventions/"
_TRANSFORMERS = "transformers"
_NAMING = {
    _RANKS: ("forked_program", "run_forked", "writer_process", "crash_at", "executor_process", "forked_launch"),
    _TRANSFORMERS: ('lazy_module("transformers', "helpers.huggingface"),
}
"""Resources that take seconds to load, once per process -> names: a file with one of the names uses it. They are the
fork server, also for ranks, which loads torch, and transformers."""
_ENOUGH_TESTS = 2
"""A process begins a test when it knows the next one."""


class SharedFixtureScheduling(LoadScopeScheduling):
    """Gives each free process the next tests that belong together."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        of_others = (scope for other, work in self.assigned_work.items() if other is not node for scope in work)
        scope = next_scope(list(self.workqueue), self.assigned_work[node], of_others)
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        # The base class keeps one more test in reserve; here another process may be free earlier.
        if self._pending_of(self.assigned_work[node]) < _ENOUGH_TESTS or node.shutting_down:
            super()._reschedule(node)


def scope_of(nodeid: str) -> str:
    """Return the name of the tests that stay together: usually those of a file.

    The tests that read the syntax trees of all files stay together too, because each process parses them once. Tests of
    launched jobs take long and share nothing, except those of SHARED_JOBS: each of the others is alone.
    """
    file = nodeid.split("::", 1)[0]
    if file.startswith(_LAUNCHED):
        return file if file in SHARED_JOBS else nodeid
    return _TREES if file.startswith(_TREES) else file


def next_scope(waiting: Sequence[str], own: Iterable[str], of_others: Iterable[str]) -> str:
    """Return which of the waiting scopes a process runs next: preferably one that needs no second load.

    own, of_others: the scopes that this process and the other ones received before. A process continues with tests that
    use what it has loaded. It takes tests that use what only others have loaded if nothing else waits.
    """
    loaded = {_loads(scope) for scope in own} - {""}
    by_others = {_loads(scope) for scope in of_others} - {""} - loaded

    def costs(scope: str) -> int:
        used = _loads(scope)
        return 0 if used in loaded else 2 if used in by_others else 1

    return min(waiting, key=costs)


@cache
def _loads(scope: str) -> str:
    """Return the key of _NAMING that the tests of a scope load; empty for none, and for launched jobs, which load all
    of them."""
    if scope.startswith(_LAUNCHED) or scope == _TREES:
        return ""
    if scope.startswith(_RANKS):
        return _RANKS
    text = (ROOT / scope).read_text(encoding="utf-8")
    return next((loaded for loaded, names in _NAMING.items() if any(name in text for name in names)), "")
