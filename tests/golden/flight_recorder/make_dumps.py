"""Makes the dumps beside this file: `python make_dumps.py`, with torch 2.13 on a CPU.

Three ranks on gloo run three all-reduces of the group "dp"; rank 1 never comes to the fourth. Each dumps its Flight
Recorder from another thread while ranks 0 and 2 are stuck.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

NUM_RANKS, CULPRIT = 3, 1
_STUCK_S = 3.0


def run_rank(rank: int, store: str) -> None:
    """Be one rank; end when the dump is written."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    import torch
    from torch import distributed as dist  # noqa: TID251 -- it is torch that is recorded here
    from torch._C._distributed_c10d import _dump_fr_trace_json

    dist.init_process_group(
        "gloo", rank=rank, world_size=NUM_RANKS, init_method=f"file://{store}", timeout=timedelta(seconds=10)
    )
    group = dist.new_group(list(range(NUM_RANKS)), group_desc="dp")
    x = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(x, group=group)

    def dump() -> None:
        threading.Event().wait(_STUCK_S)
        text = _dump_fr_trace_json()
        path = Path(__file__).with_name(f"rank_{rank}.json")
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        threading.Event().wait(1.0)  # its peers dump too, before they see it go
        os._exit(0)

    threading.Thread(target=dump).start()
    if rank != CULPRIT:
        dist.all_reduce(x, group=group)
    threading.Event().wait(2 * _STUCK_S)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=run_rank, args=(rank, f"{directory}/store")) for rank in range(NUM_RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
