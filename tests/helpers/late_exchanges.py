"""Ranks that train while random exchanges are delayed, in buffers that hold NaN until data has arrived."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatrain.comm import Mesh
from megatrain.comm.channel import Channel
from megatrain.comm.exchange import Exchange, ExchangeRunner, Pending
from megatrain.comm.group import Group
from megatrain.config.config import Config
from megatrain.contracts.black_box.values import Identity
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step import train_step
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.paced_train import pause_until
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.training_case import make_config, on_layout

Tables = dict[str, dict[str, Any]]
MOST_S = 0.004
LATE_PART = 0.1
NUM_STEPS = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
_MAX_RANKS = 8


SHORT: Tables = {"train": {"precision": "fp32"}, "model": {"dropout": 0.1}}
ZERO_2: Tables = {"parallel": {"zero_stage": 2}}
SHALLOW: Tables = {"model": {"num_layers": 2, "dropout": 0.1}}
"""For layouts in which two layers are enough for all chunks. Each layer has exchanges of the same kinds."""
LATE_CASES: dict[str, tuple[Tables, ...]] = {
    "dp2-chunks2": (on_layout(1, 1, 2, 2), SHALLOW),
    "dp4-zero2": (on_layout(1, 1, 4), ZERO_2, SHALLOW),
    "pp2-dp2-chunks2-aligned": (on_layout(1, 2, 2, 2), {"parallel": {"has_aligned_reductions": True}}),
    "pp2-dp2-zero2-chunks2": (on_layout(1, 2, 2, 2), ZERO_2),
    "pp2-dp2-gpipe-tied": (on_layout(1, 2, 2, schedule="gpipe"), SHALLOW, {"model": {"has_tied_head": True}}),
    "pp4-zero-bubble": (on_layout(1, 4, 1, schedule="zero_bubble"),),
    "pp2-chunks2": (on_layout(1, 2, 1, 2),),
    "tp2-dp2": (on_layout(2, 1, 2), SHALLOW),
    "tp2-pp2-recompute": (on_layout(2, 2, 1), {"parallel": {"recompute": "full"}}, SHALLOW),
    "tp2-dp2-sequence-chunks4": (
        on_layout(2, 1, 2),
        SHALLOW,
        {"model": {"block": "parallel", "dropout": 0.1}, "parallel": {"num_sequence_chunks": 4}},
    ),
    "tp2-pp2-dp2-bf16-chunks2": (
        on_layout(2, 2, 2, 2),
        {"train": {"precision": "bf16"}},
        {"parallel": {"grad_reduce_dtype": "bf16"}},
    ),
}


def late_case(changes: Sequence[Tables], *, overlap: bool) -> Config:
    """Return a case's configuration."""
    return make_config(SHORT, *changes, {"parallel": {"overlap": overlap}})


def random_case(seed: int) -> tuple[Tables, ...]:
    """Return a schedule, a layout and options that are valid together; schedules alternate."""
    draw = random.Random(seed)
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    while True:
        tp_size, pp_size, dp_size = (draw.choice((1, 2, 4)) for _ in range(3))
        options: Tables = {
            "parallel": {
                "zero_stage": draw.choice((1, 2)),
                "recompute": draw.choice(("none", "selective", "full")),
                "num_sequence_chunks": draw.choice((1, 2)) if tp_size > 1 else 1,
                "has_aligned_reductions": draw.random() < 0.2,
            },
            "model": {
                "block": draw.choice(("serial", "parallel")),
                "has_tied_head": draw.random() < 0.5,
                "dropout": draw.choice((0.0, 0.1)),
            },
        }
        num_chunks = 2 if schedule == "interleaved" else 1
        options["model"]["num_layers"] = max(2, pp_size * num_chunks)
        layout = on_layout(tp_size, pp_size, dp_size, num_chunks, schedule)
        if 1 < tp_size * pp_size * dp_size <= _MAX_RANKS:
            with suppress(AssertionError):  # refused by the program's own validation
                make_config(SHORT, layout, options)
                return layout, options


@dataclass(slots=True)
class Delays:
    """Delays some exchanges of this rank; the seed determines which. Without a seed, no exchange is late."""

    rank: int
    draw: random.Random | None = None

    def set_seed(self, seed: int | None) -> None:
        self.draw = None if seed is None else random.Random(f"{seed}-{self.rank}")

    def __call__(self, exchange: Exchange) -> None:
        if self.draw is not None and self.draw.random() < LATE_PART:
            pause_until(time.monotonic() + MOST_S * self.draw.random())


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Fill memory that waits for parameters or for a neighbor's message with NaN."""
    gather, start = Group.all_gather, Channel._start

    def poisoned_gather(self: Group, x: Tensor, operation: Any, *, out: Tensor | None = None, chunk: int = -1) -> Any:
        if out is not None and out.is_floating_point() and self.size > 1:
            own = x.clone()
            out.fill_(float("nan"))
            x.copy_(own)
        return gather(self, x, operation, out=out, chunk=chunk)

    def poisoned_start(self: Channel, operation: Any, x: Tensor, chunk: int, microbatch: int, *, is_send: bool) -> Any:
        if not is_send:
            x.fill_(float("nan"))
        pending: Pending = start(self, operation, x, chunk, microbatch, is_send=is_send)
        return pending

    with patch.object(Group, "all_gather", poisoned_gather), patch.object(Channel, "_start", poisoned_start):
        yield


def train_late(context: RankContext, changes: Sequence[Tables], seeds: Sequence[int]) -> tuple[str, list[str]]:
    """Train with overlap off and without delays, and then with overlap on, once for each seed of delays. Runs on the
    pool.

    Returns a digest of the losses, gradient norms and optimizer state of the first run, and those of the others.
    """
    on, off = (late_case(changes, overlap=overlap) for overlap in (True, False))
    device = torch.device("cpu")
    delays = Delays(context.rank)
    mesh, recorder = open_mesh(context, on, delays)
    in_time = train_digest(build_rank_model(off, mesh, recorder, device), recorder)
    late = []
    for seed in seeds:
        delays.set_seed(seed)
        # some with exchanges that start before the lane's thread is awake, as without delays
        with poisoned_buffers(), patch.object(ExchangeRunner, "starts_at_once", seed % 2 == 1):
            late.append(train_digest(build_rank_model(on, mesh, recorder, device), recorder))
    delays.set_seed(None)
    mesh.barrier()
    recorder.close()
    return in_time, late


def open_mesh(
    context: RankContext, config: Config, before_exchange: Callable[[Exchange], None]
) -> tuple[Mesh, Recorder]:
    """Join the peers of this rank of the pool. `before_exchange` is called with each exchange right before it
    starts."""
    layout, rank = config.layout(context.world_size), context.rank
    identity = Identity("exchanges", "main", 0, rank, layout, os.getpid(), "host")
    recorder = open_recorder(identity, directory="", run_key="exchanges", num_records=256)
    mesh = joined_mesh(
        context,
        layout,
        recorder,
        has_wrap_links=config.parallel.num_chunks > 1,
        holders=config.holders,
        has_sequence_chunks=config.parallel.num_sequence_chunks > 1,
        before_exchange=before_exchange,
    )
    return mesh, recorder


def train_digest(rank_model: RankModel, recorder: Recorder, num_steps: int = NUM_STEPS) -> str:
    """Train from the initial weights. Returns a digest of the losses, gradient norms and optimizer state."""
    rank_model.initialize()
    rank_model.set_training(True)
    config = rank_model.config
    num_microbatches = config.num_microbatches(config.layout(None))
    digest = hashlib.blake2b()
    for step in range(num_steps):
        recorder.set_step(step)
        generator = torch.Generator().manual_seed(1000 * step + rank_model.mesh.coordinate["dp"])
        shape = (config.model.seq_len + 1, config.batch.micro_batch_size)
        tokens = [
            torch.randint(0, config.model.vocab_size, shape, generator=generator) for _ in range(num_microbatches)
        ]
        samples = torch.arange(shape[1])
        outcome = train_step(
            rank_model,
            config.parallel.build_schedule(num_microbatches),
            [rank_model.pipeline_input(token[:-1], token[1:], samples, None) for token in tokens],
            num_label_tokens=num_microbatches * (shape[0] - 1) * shape[1],
            lr=1e-2,
            grad_clip=0.5,
            recorder=recorder,
        )
        recorder.complete_step()
        digest.update(repr((outcome.loss, outcome.grad_norm, outcome.is_skipped)).encode())
        assert not outcome.is_skipped
    for chunk in rank_model.data_parallel:
        chunk.finish_gather()
    for _, state in rank_model.optimizer.states:
        for flat in state.tensors().values():
            digest.update(flat.numpy())
    return digest.hexdigest()


def assert_late_changes_nothing(pool: RankPool, changes: Sequence[Tables], seeds: Sequence[int]) -> None:
    """Train a case with each seed's delays and compare all bits with those of a run without delays."""
    world_size = late_case(changes, overlap=True).layout(None).world_size
    for rank, (in_time, late) in enumerate(pool.run(train_late, world_size, changes, seeds)):
        assert len(late) == len(seeds)
        different = [seed for seed, digest in zip(seeds, late, strict=True) if digest != in_time]
        assert different == [], f"rank {rank} of {changes}"
