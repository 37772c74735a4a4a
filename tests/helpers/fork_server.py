"""The fork server of a test session: it imports torch and the trainer once for all processes that it forks.

A cold process spends seconds on imports, and a session on two cores starts hundreds of processes. The server never
holds any state of a test: it only imports modules, and forks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOADED_MODULES = [
    "numpy",
    "pytest",
    "torch",
    "torch.distributed",
    # loaded by optimizers and checkpointing at first use
    "torch._dynamo",
    # modules of workers, and of ranks of the pool
    "megatrain.training.worker",
    "megatrain.commands.train",
    "tests.helpers.rank_worker",
    "tests.helpers.training_case",
    "tests.helpers.forked_program",
]
_ROOM_BYTES = 1 << 14
"""More than a test adds to the variables of its own process."""


def fork_context(more: Sequence[str] = ()) -> ForkServerContext:
    """Return the context whose processes the server forks; the first call starts it.

    more: additional modules that the server loads if this is the first call; otherwise its forks load them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED_MODULES, *more])
    with _servers_environment():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _servers_environment() -> Iterator[None]:
    """Start the fork server with one OpenMP thread, because eight ranks share the machine's cores, and with space for
    the environment variables of its forks: see forked_program.py."""
    changes = {"OMP_NUM_THREADS": "1", "MEGATRAIN_TEST_ROOM": "-" * _ROOM_BYTES}
    saved = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
