"""The one fork server of a test session: it loads torch and the trainer once, and whatever it forks has them.

A process that starts cold pays seconds for imports, of which a session on two cores has hundreds. Nothing of a test is
ever in the server: it imports modules, and forks.
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
    # what optimizers and checkpointing load on first use
    "torch._dynamo",
    # what workers are made of, and ranks of the pool
    "megatrain.training.worker",
    "megatrain.commands.train",
    "tests.helpers.rank_worker",
    "tests.helpers.training_case",
    "tests.helpers.forked_program",
]
_ROOM_BYTES = 1 << 14
"""More than a test adds to the variables of its own process."""


def fork_context(more: Sequence[str] = ()) -> ForkServerContext:
    """Return the context whose processes the server forks; it runs from the first call on.

    more: what that server loads too if this is the first call; else its forks load it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED_MODULES, *more])
    with _servers_environment():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _servers_environment() -> Iterator[None]:
    """Let the fork server start with one OpenMP thread, because eight ranks share the machine's cores, and with room
    for the variables of its forks: see forked_program.py."""
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
