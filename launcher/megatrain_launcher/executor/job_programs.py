"""The programs of a job, where a distribution that has some is installed: the diagnostics daemon and the web page.

Such a distribution declares an entry point in the group `megatrain.job_programs`: a function of the keywords `config`,
`run` and `etcd` (flags that lead there) which returns commands by name. One host of a job runs them. Training does not
need them: one that cannot be started, or ends, is reported and started again after a while. Each is kept by itself, so
that the end of one is nothing to the others.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatrain.commands.etcd_flags import etcd_environment, etcd_words
from megatrain.config.config import Config
from megatrain.coordination.settings import EtcdSettings
from megatrain.programs.child_process import ChildProcess
from megatrain.programs.kept_program import keep_running

ENTRY_POINT_GROUP = "megatrain.job_programs"


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What the programs of a job are started with."""

    config: Config
    run: Path
    etcd: EtcdSettings
    environment: Mapping[str, str]


@contextmanager
def running_programs(settings: ProgramSettings, tell: Callable[[str], None]) -> Iterator[None]:
    """Have every installed program of the job run during the block. `tell` is called from threads of their own."""
    is_over = threading.Event()
    # each in a thread of its own, with which the kernel ends it
    threads = [
        threading.Thread(target=_keep, args=(name, words, settings, is_over, tell), name=name)
        for name, words in _commands(settings, tell).items()
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


def _commands(settings: ProgramSettings, tell: Callable[[str], None]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            commands = entry_point.load()(config=settings.config, run=settings.run, etcd=etcd_words(settings.etcd))
            found |= {str(name): [str(word) for word in words] for name, words in commands.items()}
        except Exception as error:  # noqa: BLE001 -- another distribution's code may fail in any way
            tell(f"{entry_point.name} cannot be started: {type(error).__name__}: {error}; the job runs without it")
    return found


def _keep(
    name: str,
    words: Sequence[str],
    settings: ProgramSettings,
    is_over: threading.Event,
    tell: Callable[[str], None],
) -> None:
    """Keep one program running until all is over."""
    log = settings.run / "logs" / f"{name}.log"
    environment = {**settings.environment, **etcd_environment(settings.etcd)}

    def start() -> ChildProcess:
        log.parent.mkdir(parents=True, exist_ok=True)
        return ChildProcess(words, log=log, environment=environment)

    keep_running(name, start, is_over, lambda text: tell(f"{text}; see {log}"))
