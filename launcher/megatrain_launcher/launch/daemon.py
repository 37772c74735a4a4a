"""The diagnostics daemon, where a distribution that has one is installed: started beside a standalone launch.

Such a distribution declares an entry point in the group `megatrain.daemon`: a function that takes the run directory,
etcd's endpoints and the job's name, and returns the words of a command, none where there is nothing to run. The daemon
is never needed: one that cannot be started, or ends, is told of and that is all.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatrain_launcher.child_process import ChildProcess

ENTRY_POINT_GROUP = "megatrain.daemon"
_LOOK_S = 1.0


@contextmanager
def running_daemons(
    run: Path, endpoints: tuple[str, ...], job: str, environment: Mapping[str, str], tell: Callable[[str], None]
) -> Iterator[None]:
    """Have every installed daemon run during the block."""
    running: dict[Path, ChildProcess] = {}
    with ExitStack() as stack:
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            log = run / "logs" / f"{entry_point.name}.log"
            try:
                words = [str(word) for word in entry_point.load()(run, endpoints, job)]
                if not words:
                    continue
                log.parent.mkdir(parents=True, exist_ok=True)
                running[log] = stack.enter_context(ChildProcess(words, log=log, environment=environment))
            except Exception as error:  # noqa: BLE001 -- another distribution's code may fail in any way
                tell(f"{entry_point.name} cannot be started: {type(error).__name__}: {error}; the job runs without it")
        is_over = threading.Event()
        watch = threading.Thread(target=_tell_of_ends, args=(running, is_over, tell), name="daemons", daemon=True)
        watch.start()
        try:
            yield
        finally:
            is_over.set()
            watch.join()


def _tell_of_ends(running: Mapping[Path, ChildProcess], is_over: threading.Event, tell: Callable[[str], None]) -> None:
    """Say of each daemon that ends that it has, until all is over."""
    left = dict(running)
    while left and not is_over.wait(_LOOK_S):
        for log, child in tuple(left.items()):
            code = child.poll()
            if code is not None:
                del left[log]
                tell(f"{log.stem} ended with exit code {code}, see {log}; the job runs without it")
