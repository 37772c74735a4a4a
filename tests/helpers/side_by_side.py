"""Which tests one process runs when several run side by side (`pytest -n`)."""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling


class SharedFixtureScheduling(LoadScopeScheduling):
    """The tests of a file stay together, and so do all that use the pool of ranks: there is one pool a session."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "ranks" if file.startswith("tests/dist/") else file
