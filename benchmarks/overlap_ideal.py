"""The ideal time of a step: a replay of its schedule with measured compute times and the rate of the links."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.overlap_replay import LinkReplay
from megatrain.chunks.builder import build_chunks
from megatrain.comm import dry_mesh
from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Record
from megatrain.contracts.layout import STAGES
from megatrain.parallel.offload import ImmediateCopies
from megatrain.schedule import Action, ActionKind

_ELEMENT_BYTES = 4
_NUM_STEPS = 3
"""Consecutive steps in a replay. The difference between the last two ends is the time of a step in steady state."""
_COMPUTES = {
    Operation.FORWARD_COMPUTE.value: ActionKind.FORWARD,
    Operation.BACKWARD_COMPUTE.value: ActionKind.BACKWARD,
}
_SENDS = {
    ActionKind.SEND_FORWARD: (ActionKind.FORWARD, +1),
    ActionKind.SEND_BACKWARD: (ActionKind.BACKWARD, -1),
}


@dataclass(slots=True)
class Computes:
    """Median seconds of a rank's compute in a step: `parts` by kind, chunk and micro-batch, and the update."""

    parts: dict[tuple[ActionKind, int, int], float] = field(default_factory=dict)
    update: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values()) + self.update


def measured_computes(records: Sequence[Record], steps: set[int]) -> Computes:
    """Return the compute times of these steps from a rank's black box."""
    found: dict[Any, list[float]] = {}
    for record in records:
        if record.step not in steps or not record.is_span or record.duration_ns is None:
            continue
        if record.operation in _COMPUTES:
            found.setdefault((_COMPUTES[record.operation], record.chunk, record.microbatch), []).append(
                record.duration_ns / 1e9
            )
        elif record.operation in (Operation.OPTIMIZER.value, Operation.CLIP.value):
            found.setdefault(record.operation, []).append(record.duration_ns / 1e9)
    medians = {key: statistics.median(values) for key, values in found.items()}
    update = sum(medians.pop(name, 0.0) for name in (Operation.OPTIMIZER.value, Operation.CLIP.value))
    return Computes(medians, update)


def sent_by_schedule(config: Config) -> float:
    """Return the bytes that a rank sends in a step, as the mean over stages."""
    bucket_bytes, message_bytes = sent_bytes(config)
    schedule = config.parallel.build_schedule(config.num_microbatches(config.layout(None)))
    num_messages = sum(action.kind in _SENDS for actions in schedule.stages for action in actions)
    shared = 2 * sum(map(sum, bucket_bytes.values()))
    return (shared + (num_messages * message_bytes if schedule.pp_size > 1 else 0)) / schedule.pp_size


def sent_bytes(config: Config) -> tuple[dict[tuple[int, int], list[int]], int]:
    """Return by (stage, chunk) the bytes that a rank sends to gather or to reduce each bucket, in the order of
    backward, and the bytes of a message.

    Parameters and gradients are fp32.
    """
    layout = config.layout(None)
    found = {}
    for stage in range(layout.pp_size):
        rank = layout.first_rank_of(stage)
        with dry_mesh(layout, rank, has_wrap_links=config.parallel.num_chunks > 1, holders=config.holders) as mesh:
            chunks = build_chunks(config, mesh, torch.device("meta"), ImmediateCopies())
        for number, chunk in enumerate(chunks):
            found[stage, number] = [
                bucket.numel * _ELEMENT_BYTES * (layout.dp_size - 1) // layout.dp_size
                for bucket in chunk.data_parallel.buckets
            ]
    model = config.model
    message = model.seq_len // layout.tp_size * config.batch.micro_batch_size * model.hidden_size * _ELEMENT_BYTES
    return found, message


def ideal_of_schedule(config: Config, computes: Sequence[Computes], rate: float) -> float:
    """Return the seconds of a step. computes: by rank. rate: bytes a second that a rank sends.

    A chunk computes its buckets one after the other, for times in proportion to their bytes. The first forward waits
    for each bucket where it needs it, and each bucket is reduced as soon as the last backward is done with it.
    """
    replay = _Replay(config, rate)
    ends = []
    updates: list[int | None] = [None] * len(computes)
    for step in range(_NUM_STEPS):
        updates = [replay.add_rank(step, rank, compute, updates[rank]) for rank, compute in enumerate(computes)]
        ends.append([update for update in updates if update is not None])
    end = replay.ends()
    return float(max(end[ends[-1]]) - max(end[ends[-2]]))


class _Replay:
    """The computations and messages of some steps of all ranks, with their dependencies."""

    def __init__(self, config: Config, rate: float) -> None:
        self._layout = config.layout(None)
        self._schedule = config.parallel.build_schedule(config.num_microbatches(config.layout(None)))
        bucket_bytes, message_bytes = sent_bytes(config)
        self._exchange_s = {key: [size / rate for size in sizes] for key, sizes in bucket_bytes.items()}
        self._message_s = message_bytes / rate if self._layout.pp_size > 1 else 0.0
        self._replay = LinkReplay()
        self._arrivals: dict[Any, int] = {}
        """Messages by step, rank and the action that consumes them."""
        self._consumers: list[tuple[Any, int]] = []

    def ends(self) -> NDArray[np.float64]:
        """Return the ends of all computations and messages, in the order in which they were added."""
        for what, number in self._consumers:
            if what in self._arrivals:
                self._replay.wait(self._arrivals[what], number)
        return self._replay.ends()

    def add_rank(self, step: int, rank: int, computes: Computes, last_update: int | None) -> int:
        """Add a rank's step. Returns the number of its parameter update, which all ranks begin together."""
        schedule, replay, at = self._schedule, self._replay, self._layout.coordinate(rank)
        stage, peers = at[STAGES], (at[STAGES], at["tp"])
        gathers: dict[int, list[int]] = {}
        for chunk in range(schedule.num_chunks):
            after = [] if last_update is None else [last_update]
            gathers[chunk] = [
                replay.send(rank, "dp", seconds if after else 0.0, after, (step, "gather", chunk, bucket, peers))
                for bucket, seconds in enumerate(reversed(self._exchange_s[stage, chunk]))
            ]
        last, reduced = -1, []
        last_backwards = {a.chunk: a for a in schedule.stages[stage] if a.kind is ActionKind.BACKWARD}
        for action in schedule.stages[stage]:
            chunk, exchanges = action.chunk, self._exchange_s[stage, action.chunk]
            if action.kind in _COMPUTES.values():
                seconds = computes.parts[action.kind, chunk, action.microbatch]
                if action.kind is ActionKind.FORWARD and chunk in gathers:
                    parts = _parts(seconds, exchanges[::-1])
                    numbers = [
                        replay.compute(rank, part, [gather])
                        for part, gather in zip(parts, gathers.pop(chunk), strict=True)
                    ]
                elif last_backwards[chunk] == action:
                    numbers = []
                    for bucket, (part, exchange) in enumerate(zip(_parts(seconds, exchanges), exchanges, strict=True)):
                        numbers.append(replay.compute(rank, part, []))
                        group = (step, "reduce", chunk, bucket, peers)
                        reduced.append(replay.send(rank, "dp", exchange, [numbers[-1]], group))
                else:
                    numbers = [replay.compute(rank, seconds, [])]
                last = numbers[-1]
                self._consumers.append(((step, rank, action), numbers[0]))
            elif action.kind in _SENDS:
                consumer, direction = _SENDS[action.kind]
                consumed = schedule.placement.model_chunk(stage, chunk) + direction
                to, to_chunk = schedule.placement.stage_and_chunk(consumed)
                receiver = self._layout.ranks_along(rank, STAGES)[to]
                # within one stage, chunks pass activations in memory
                sent = last if receiver == rank else replay.send(rank, direction, self._message_s, [last])
                self._arrivals[step, receiver, Action(consumer, to_chunk, action.microbatch)] = sent
        return replay.compute(rank, computes.update, reduced, (step, "update"))


def _parts(seconds: float, exchanges: Sequence[float]) -> list[float]:
    """Return the compute time of each bucket of a chunk."""
    whole = sum(exchanges)
    return [seconds * (exchange / whole if whole else 1.0 / len(exchanges)) for exchange in exchanges]
