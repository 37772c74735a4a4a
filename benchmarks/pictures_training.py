"""A training step beside a producer of pictures that has a core of its own, and the same step with cached pictures.

The trainer, with the thread that reads ahead, is on the first core, the producer on the last one. Both sides train one
model: one asks the producer for the pictures of each step, the other repeats the first eight steps from memory while
the producer is idle. They take turns in blocks of steps, in the order on, off, off, on. NVIDIA DALI decodes if it is
installed, else Pillow. Needs two cores; run alone on the machine:
PYTHONPATH=.venv/dali python -m benchmarks pictures_training [--write]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks.bars import at_most
from benchmarks.pictures_sides import FORMAT, producer_on_last_core, write_shard
from benchmarks.result import MissingPartError, Result
from benchmarks.single_rank_trainer import BenchmarkTrainer
from megatrain.config.config import Config
from megatrain.contracts.step_plan import Dealing, StepPlan
from megatrain.data.pictures.dali_package import find_dali
from megatrain.data.pictures.picture_format import DALI, PILLOW
from megatrain.data.pictures.picture_index import build_index
from megatrain.data.prefetch import Prefetcher
from megatrain.data.tokenizer import train_tokenizer
from megatrain.training.picture_data import find_decoder
from megatrain.training.training_data import all_shards, open_reader
from tests.helpers.training_case import make_config

BESIDE, CACHED = "producer beside it", "cached pictures"
BLOCKS = 16
BLOCK_STEPS = 12
PICTURES = 320
VOCAB_SIZE = 264
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 8, 2
CACHED_STEPS = 8
BAR = 1.03
MODEL = {
    "vocab_size": VOCAB_SIZE, "seq_len": 288, "hidden_size": 256, "num_layers": 4, "num_heads": 4,
    "picture_size": FORMAT.size, "patch_size": FORMAT.patch, "encoder_hidden_size": 64, "encoder_num_layers": 2,
    "encoder_num_heads": 4,
}  # fmt: skip


def run(num_blocks: int = BLOCKS, block_steps: int = BLOCK_STEPS, num_pictures: int = PICTURES) -> Result:
    """Train in turns on both sides. Raises: MissingPartError on one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise MissingPartError("cores", "trainer and producer need a core each, and this process may use one")
    decoder = PILLOW if find_dali().problem else DALI
    seconds: dict[str, list[float]] = {BESIDE: [], CACHED: []}
    with tempfile.TemporaryDirectory(prefix="pictures-") as name, ExitStack() as stack:
        config = _config(Path(name), decoder, num_pictures)
        producers, cpu_s = stack.enter_context(producer_on_last_core(Path(config.pictures.shards), decoder))
        stack.enter_context(_on_core(cores[0]))
        reader = open_reader(config)
        (shards,) = all_shards(reader, ())
        find_decoder(config, [shards], has_begun=False)
        stack.enter_context(shards.connect(producers))
        cached = [reader.read_step(plan, 0) for plan, _ in zip(_plans(), range(CACHED_STEPS), strict=False)]
        again = cycle(cached)
        batches = {
            BESIDE: stack.enter_context(Prefetcher(lambda plan: reader.read_step(plan, 0), _plans(), 2)),
            CACHED: stack.enter_context(Prefetcher(lambda _plan: next(again), _plans(), 2)),
        }
        trainer = BenchmarkTrainer(config, torch.device("cpu"))
        stack.callback(trainer.close)
        for side in batches:
            _block_seconds(trainer, batches[side], 2)  # allocates
        used_s = beside_s = 0.0
        for block in range(num_blocks):
            side = BESIDE if block % 4 in (0, 3) else CACHED
            began, began_cpu_s = time.perf_counter(), cpu_s()
            seconds[side] += _block_seconds(trainer, batches[side], block_steps)
            if side == BESIDE:
                used_s += cpu_s() - began_cpu_s
                beside_s += time.perf_counter() - began
    ratio = statistics.median(seconds[BESIDE]) / statistics.median(seconds[CACHED])
    return Result(
        name="pictures-training",
        title="A training step beside a producer of pictures with a core of its own",
        command="PYTHONPATH=.venv/dali python -m benchmarks pictures_training --write",
        rows=[_row(side, seconds) for side in seconds],
        notes=[
            f"{num_blocks} blocks of {block_steps} steps, in the order on, off, off, on",
            "one core each for the trainer, with its thread that reads ahead, and for the producer",
            f"the producer used {used_s / beside_s:.0%} of its core in the blocks beside the trainer",
            f"ratio: the median / that of {CACHED}",
        ],
        settings={"decoder": decoder, "pictures_of_step": GLOBAL_BATCH_SIZE, **MODEL},
        bars=[at_most(f"seconds of a step, {BESIDE} / {CACHED}", ratio, BAR)],
    )


def _config(directory: Path, decoder: str, num_pictures: int) -> Config:
    write_shard(directory / "shard.tar", num_pictures)
    build_index(directory)
    tokenizer = directory / "tokenizer.json"
    train_tokenizer(["caption"] * 2, VOCAB_SIZE).save(tokenizer)
    return make_config(
        {
            "model": MODEL,
            "batch": {"micro_batch_size": MICRO_BATCH_SIZE, "global_batch_size": GLOBAL_BATCH_SIZE},
            "train": {"precision": "fp32"},
            "data": {"pictures": "shards", "tokenizer": str(tokenizer)},
            "pictures": {"shards": str(directory), "decoder": decoder},
        }
    )


def _plans() -> Iterator[StepPlan]:
    """Yield steps without end."""
    dealing = Dealing(GLOBAL_BATCH_SIZE // MICRO_BATCH_SIZE, 1)
    for step in count():
        yield StepPlan(step * GLOBAL_BATCH_SIZE, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, dealing)


def _block_seconds(trainer: BenchmarkTrainer, batches: Prefetcher, num_steps: int) -> list[float]:
    """Return the seconds of each step after the first one, with the wait for its batch."""
    seconds = []
    for _ in range(num_steps + 1):
        began = time.perf_counter()
        trainer.step_of(batches.next())
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Have this thread, and those that it starts, run on one core during the block."""
    cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        os.sched_setaffinity(0, cores)


def _row(side: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    some, median_s = sorted(seconds[side]), statistics.median(seconds[side])
    return {
        "side": side,
        "steps": len(some),
        "step, ms": 1000 * median_s,
        "p10": 1000 * some[len(some) // 10],
        "p90": 1000 * some[len(some) * 9 // 10],
        "ratio": median_s / statistics.median(seconds[CACHED]),
    }
