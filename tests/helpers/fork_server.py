"""The one fork server of a test session: it loads torch and the trainer once, and whatever it forks has them.

A process that starts cold pays seconds for imports, of which a session on two cores has hundreds. Nothing of a test is
ever in the server: it imports modules, and forks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
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


def fork_context() -> ForkServerContext:
    """Return the context whose processes the server forks; it runs from the first call on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    with _single_threaded_environment():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _single_threaded_environment() -> Iterator[None]:
    """Let the fork server start with one OpenMP thread: eight ranks share the machine's cores."""
    saved = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if saved is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = saved
