"""The CPU priority of what runs beside training on a host: checkpoint writer, peer copies, data loader, producers of
pictures, streamer.

Each program has its own niceness. The environment variable MEGATRAIN_BACKGROUND_NICENESS (0 to 19) is an upper limit
for all of them; child processes inherit it. With 0 they keep the priority of the process that starts them: on a machine
that is busy with other work, a program of low priority hardly runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from megatrain.contracts.errors import ConfigError

NICENESS_VARIABLE: Final = "MEGATRAIN_BACKGROUND_NICENESS"
LOWEST_PRIORITY: Final = 19


def background_niceness(niceness: int, environment: Mapping[str, str]) -> int:
    """Return `niceness`, but at most the limit that the environment sets.

    Raises: ConfigError if the variable is not a whole number from 0 to 19.
    """
    text = environment.get(NICENESS_VARIABLE) or str(LOWEST_PRIORITY)
    if not text.isascii() or not text.isdecimal() or int(text) > LOWEST_PRIORITY:
        problem = (
            f"environment variable {NICENESS_VARIABLE}={text!r} must be a whole number from 0 to {LOWEST_PRIORITY}"
        )
        raise ConfigError([f"{problem}; unset it for the default priorities"])
    return min(niceness, int(text))


def lower_process_priority(niceness: int) -> None:
    """Lower the priority of this process by `niceness`, limited by the environment, and let it use all cores.

    At the lowest priority the scheduler also treats it as a batch job. Settings without permission are skipped.
    Raises: ConfigError as `background_niceness` does.
    """
    niceness = background_niceness(niceness, os.environ)
    if niceness:
        with suppress(OSError):
            os.nice(niceness)
    if niceness == LOWEST_PRIORITY:
        with suppress(OSError):
            # not SCHED_IDLE: beside processes in busy loops, a checkpoint would never reach storage
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if niceness and os.getsid(0) == os.getpid():
        with suppress(OSError):
            # the scheduler may divide CPU time among sessions: by default this one would get as much as all workers
            Path("/proc/self/autogroup").write_text(str(niceness))
    _use_all_cores()


def lower_thread_priority() -> None:
    """Give the calling thread the lowest priority that the environment allows, and let it use all cores.

    Settings without permission are skipped. Raises: ConfigError as `background_niceness` does.
    """
    if niceness := background_niceness(LOWEST_PRIORITY, os.environ):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    _use_all_cores()


def _use_all_cores() -> None:
    with suppress(OSError):
        # a worker that started this is bound to the cores that training needs: use the others too
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
