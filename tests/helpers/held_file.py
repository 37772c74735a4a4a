"""A file whose open blocks for a while, as on storage that does not answer.

Another process has a lease on the file (fcntl, F_SETLEASE). The kernel blocks an open by any other process until the
lease is released, for 45 seconds at most. An open with O_NONBLOCK does not wait: it fails.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.require import require
from tests.helpers.waiting import DEADLINE_S

_HOLDER = """
import fcntl, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
signal.sigwait([signal.SIGIO])
print("asked for", flush=True)
sys.stdin.read()
"""


class HeldFile:
    """The process that has the lease."""

    def __init__(self, holder: subprocess.Popen[str]) -> None:
        self._holder = holder

    def wait_until_asked_for(self) -> None:
        """Return once a process waits for the file."""
        assert self._holder.stdout is not None
        assert select.select([self._holder.stdout], [], [], DEADLINE_S)[0], "no process has opened the file"
        assert self._holder.stdout.readline() == "asked for\n"

    def release(self) -> None:
        """Allow the file to be opened again."""
        self._holder.kill()
        self._holder.communicate()


@contextmanager
def held_file(path: Path) -> Iterator[HeldFile]:
    """Hold an existing file. Skips the test on a file system without leases."""
    holder = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _HOLDER, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    held = HeldFile(holder)
    try:
        assert holder.stdout is not None
        assert holder.stderr is not None
        is_held = holder.stdout.readline() == "held\n"
        require("leases", found=is_held, reason="" if is_held else holder.stderr.read().strip())
        yield held
    finally:
        held.release()
