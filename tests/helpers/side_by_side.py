"""Which tests one process runs when several run side by side (`pytest -n`)."""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling


class SharedFixtureScheduling(LoadScopeScheduling):
    """The tests of a file stay together.

    So do all that use the pool of ranks, of which there is one a session, and all that read the syntax trees of all
    files, which are made once a process.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        shared = ("tests/dist/", "tests/unit/conventions/")
        return next((directory for directory in shared if file.startswith(directory)), file)
