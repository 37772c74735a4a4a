"""The rank's side of the pool: run one job after another, each from the same state."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.distributed as distributed

from tests.helpers.rank_protocol import FailedRank, RankJob


def serve(link: Connection) -> None:
    """Run as a rank: run jobs until the other end of the link is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends its ranks.
    gc.freeze()  # The objects of torch live forever: traversing them after each run would cost 50 ms per rank.
    environment = dict(os.environ)
    link.send_bytes(b"ready")
    while True:
        try:
            job: RankJob = pickle.loads(link.recv_bytes())
        except EOFError:
            return
        outcome = _run_job(job)
        os.environ.clear()
        os.environ.update(environment)
        link.send_bytes(outcome)


def _run_job(job: RankJob) -> bytes:
    """Call the job's function in a fresh state. Return its pickled result, or a pickled FailedRank."""
    rank = job.context.rank
    _reset_state()
    with open(job.stack_file, "w") as stack_file:
        faulthandler.dump_traceback_later(job.timeout_s, exit=True, file=stack_file)
        try:
            sys.path[:] = job.import_path
            function: Any = importlib.import_module(job.module_name)
            for name in job.qualified_name.split("."):
                function = getattr(function, name)
            outcome = pickle.dumps(function(job.context, *pickle.loads(job.args)))
        except BaseException:  # noqa: BLE001 - a rank's SystemExit is a failure like any other: it did not return
            outcome = pickle.dumps(FailedRank(rank, time.monotonic_ns(), traceback.format_exc()))
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()
    gc.collect()
    return outcome


def _reset_state() -> None:
    """Undo what a trainer sets for its whole process."""
    gc.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
