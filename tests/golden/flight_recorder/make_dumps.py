"""Creates the dumps beside this file and in ../flight_recorder_default: `python make_dumps.py`, with torch 2.13 on a
CPU.

Three ranks on gloo run three all-reduces of the group "dp"; rank 1 never enters the fourth one. Each rank dumps its
Flight Recorder from another thread while ranks 0 and 2 are stuck. Then three other ranks do the same in the default
group, after a scatter, a gather, an uneven all-to-all and an all-gather.
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


def run_rank(rank: int, store: str, is_default: bool) -> None:
    """Run as one rank; end when the dump is written."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    import torch
    from torch import distributed as dist  # noqa: TID251 -- it is torch that is recorded here
    from torch._C._distributed_c10d import _dump_fr_trace_json

    dist.init_process_group(
        "gloo", rank=rank, world_size=NUM_RANKS, init_method=f"file://{store}", timeout=timedelta(seconds=10)
    )
    x, ranks = torch.ones(4), range(NUM_RANKS)
    group = None if is_default else dist.new_group(list(ranks), group_desc="dp")
    if is_default:
        dist.scatter(torch.zeros(4), [torch.ones(4) for _ in ranks] if rank == 0 else None)
        dist.gather(x, [torch.zeros(4) for _ in ranks] if rank == 0 else None)
        received, given = [one + 1 for one in ranks], [rank + 1 for _ in ranks]
        dist.all_to_all_single(torch.zeros(sum(received)), torch.ones(sum(given)), received, given)
        dist.all_gather([torch.zeros(4) for _ in ranks], x)
    for _ in range(3):
        dist.all_reduce(x, group=group)

    def dump() -> None:
        threading.Event().wait(_STUCK_S)
        text = _dump_fr_trace_json()
        here = Path(__file__).parent
        directory = here.with_name("flight_recorder_default") if is_default else here
        path = directory / f"rank_{rank}.json"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        threading.Event().wait(1.0)  # Its peers dump too, before they notice its exit.
        os._exit(0)

    threading.Thread(target=dump).start()
    if rank != CULPRIT:
        dist.all_reduce(x, group=group)
    threading.Event().wait(2 * _STUCK_S)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for is_default in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            arguments = [(rank, f"{directory}/store", is_default) for rank in range(NUM_RANKS)]
            processes = [context.Process(target=run_rank, args=argument) for argument in arguments]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
