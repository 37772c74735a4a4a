"""The diagnostics daemon, where a distribution that has one is installed: kept running beside a standalone launch.

Such a distribution declares an entry point in the group `megatrain.daemon`: a function that takes the run directory,
flags that lead to etcd, and the job's name, and returns the words of a command, none where there is nothing to run. The
daemon is never needed: one that cannot be started, or ends, is told of, and started again after a while.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatrain.commands.etcd_flags import etcd_words
from megatrain.coordination.settings import EtcdSettings
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.kept_program import keep_running

ENTRY_POINT_GROUP = "megatrain.daemon"


@contextmanager
def running_daemons(
    run: Path, etcd: EtcdSettings, job: str, environment: Mapping[str, str], tell: Callable[[str], None]
) -> Iterator[None]:
    """Have every installed daemon run during the block."""
    is_over = threading.Event()
    threads = [
        threading.Thread(
            target=_keep,
            args=(entry_point, (run, etcd_words(etcd), job), environment, is_over, tell),
            name=entry_point.name,
        )
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    ]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        is_over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _keep(
    entry_point: importlib.metadata.EntryPoint,
    job: tuple[Path, Sequence[str], str],
    environment: Mapping[str, str],
    is_over: threading.Event,
    tell: Callable[[str], None],
) -> None:
    """Keep one daemon running until all is over."""
    log = job[0] / "logs" / f"{entry_point.name}.log"

    def start() -> ChildProcess:
        log.parent.mkdir(parents=True, exist_ok=True)
        return ChildProcess(words, log=log, environment=environment)

    try:
        words = [str(word) for word in entry_point.load()(*job)]
    except Exception as error:  # noqa: BLE001 -- another distribution's code may fail in any way
        tell(f"{entry_point.name} cannot be started: {type(error).__name__}: {error}; the job runs without it")
        return
    if words:
        keep_running(entry_point.name, start, is_over, lambda text: tell(f"{text}; see {log}"))
