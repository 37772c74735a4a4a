"""A program that a worker starts beside training, in its own session, and that writes to its own log."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO


def start_companion(
    command: Sequence[str], log: Path, name: str, inherited: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program. It survives this process, unless it installs a parent-death guard (programs/processes.py).

    Its output is appended to `log` if that can be opened: a full disk there must not prevent the program's work.
    While this process runs, a thread of this `name` waits for the program, so that it does not remain as a zombie.
    `inherited`: descriptors that the program keeps open, such as that of a lock.
    No code runs in the child before the program: a worker has threads and maps much memory.

    Raises: OSError when it cannot be started.
    """
    with _open_log(log) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=inherited,
        )
    threading.Thread(target=process.wait, name=name, daemon=True).start()
    return process


def _open_log(log: Path) -> IO[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)  # a user may have removed the directory
        return log.open("ab")
    except OSError:
        return open(os.devnull, "wb")
