"""The time lost to imbalance between samples that are dealt in order or by cost, in simulated steps of 64 replicas.

A replica computes for the cost of its samples (data/sample_costs.py). A step takes as long as its longest replica. A
pipeline is replayed with the schedule's own lists of actions; messages take no time. Documents are this Python's own
library and lengths drawn from a log-normal distribution, packed by best fit.
Run: python -m benchmarks balance [--write]
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bars import Bar, at_least, at_most
from benchmarks.packing import drawn_lengths, library_lengths
from benchmarks.result import Result
from megatrain.config.model_products import DocumentCost
from megatrain.contracts.step_plan import Dealing
from megatrain.data.balance import balanced_order, replica_costs
from megatrain.data.packing import BLOCK_DOCUMENTS, pack_block
from megatrain.data.sample_costs import length_costs
from megatrain.schedule import build_schedule
from tests.helpers.timed_schedules import pipeline_times

STEPS = 16
REPLICAS = 64
SEQ_LENS = (8192, 32_768)
PER_REPLICA = (2, 4, 8, 16)
BARRED = (32_768, 8)
LONGEST_BAR = 1.05
SAVED_BAR = 0.7
PLANNED_SAMPLES = 10_048
PLAN_ROUNDS = 9
STAGES, MICROBATCHES = 8, 32
SCHEDULES = {"1f1b": 1, "zero_bubble": 1, "interleaved": 2}
COST = DocumentCost(per_token=800_000, windows=((0, 32),))
"""A model of 32 layers with 4,096 hidden units. The unit: the multiplications of one pair of tokens in one layer."""
Costs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ImbalanceLoss:
    """How much longer than without imbalance a step takes, dealt in order and by cost; 0.1: a tenth longer."""

    in_order: float
    by_cost: float

    @property
    def saved(self) -> float:
        """The part of the time lost to imbalance that dealing by cost saves."""
        return 1.0 - self.by_cost / self.in_order


def run() -> Result:
    """Simulate the steps; only the seconds to plan depend on the machine."""
    rows, bars = list[dict[str, Any]](), list[Bar]()
    for name, lengths in {"Python's library": library_lengths(), "log-normal": drawn_lengths()}.items():
        for seq_len in SEQ_LENS:
            costs = sample_costs(lengths, seq_len)
            for count in PER_REPLICA:
                found = of_replicas(costs, Dealing(count * REPLICAS, REPLICAS))
                rows.append(_row(name, seq_len, f"{REPLICAS} replicas, {count} samples each", found))
                if (seq_len, count) == BARRED:
                    figure = f"{name}, {seq_len:,}, {count} samples a replica"
                    bars.append(at_most(f"{figure}: longest / mean", 1.0 + found.by_cost, LONGEST_BAR))
                    bars.append(at_least(f"{figure}: imbalance that is gone", found.saved, SAVED_BAR))
            uneven = of_replicas(costs, Dealing(512, 60))
            rows.append(_row(name, seq_len, "60 replicas, 8 or 9 samples each", uneven))
            for schedule, num_chunks in SCHEDULES.items():
                what = f"{schedule}, {STAGES} stages, {MICROBATCHES} micro-batches"
                rows.append(_row(name, seq_len, what, of_pipeline(costs, schedule, num_chunks)))
    plan_s = _plan_s(sample_costs(drawn_lengths(), SEQ_LENS[0]))
    return Result(
        name="balance",
        title="Imbalance of samples in a step, dealt in order and by cost (simulated)",
        command="python -m benchmarks balance --write",
        rows=rows,
        notes=[
            (
                "in order, by cost: how much longer than the mean the longest replica computes, or how much longer "
                f"than with equal micro-batches a pipeline takes; over {STEPS} steps"
            ),
            "saved: the part of the time lost to imbalance that dealing by cost saves",
            "costs: multiplications of a model of 32 layers and 4,096 hidden units, by the lengths of the documents",
        ],
        settings={f"seconds to deal {PLANNED_SAMPLES:,} samples to {REPLICAS} replicas": plan_s},
        bars=bars,
    )


def sample_costs(lengths: NDArray[np.int64], seq_len: int) -> Costs:
    """Return the costs of the samples into which best fit packs these documents, in a random order."""
    starts, found = np.cumsum(lengths) - lengths, list[Costs]()
    for first in range(0, len(lengths), BLOCK_DOCUMENTS):
        block = slice(first, first + BLOCK_DOCUMENTS)
        packed = pack_block(starts[block], lengths[block], seq_len)
        labels = packed.pieces["labels"].astype(np.int64)
        padding = seq_len - np.add.reduceat(labels, packed.bounds[:-1])
        found.append(np.add.reduceat(length_costs(COST, labels), packed.bounds[:-1]) + length_costs(COST, padding))
    return np.random.default_rng(0).permutation(np.concatenate(found))


def of_replicas(costs: Costs, dealing: Dealing) -> ImbalanceLoss:
    """Return the imbalance of the replicas of steps with micro-batches of one sample. Shapes: costs [samples]."""
    longest, mean = np.zeros(2), 0.0
    for step in range(STEPS):
        own = _samples_of(costs, step, dealing.num_microbatches)
        dealt = own, own[balanced_order(own, dealing, 1)]
        longest += [replica_costs(one, dealing, 1).max() for one in dealt]
        mean += float(own.sum()) / dealing.num_replicas
    return ImbalanceLoss(*(longest / mean - 1.0).tolist())


def of_pipeline(costs: Costs, schedule: str, num_chunks: int) -> ImbalanceLoss:
    """Return by how much unequal micro-batches lengthen the steps of one pipeline. Shapes: costs [samples]."""
    in_order = np.stack([_samples_of(costs, step, MICROBATCHES) for step in range(STEPS)])
    by_cost = np.stack([own[balanced_order(own, Dealing(MICROBATCHES, 1), 1)] for own in in_order])
    equal = np.repeat(in_order.mean(axis=1).astype(np.int64)[:, None], MICROBATCHES, axis=1)
    plan = build_schedule(schedule, STAGES, num_chunks, MICROBATCHES)
    times = [float(pipeline_times(plan, one).sum()) for one in (in_order, by_cost, equal)]
    return ImbalanceLoss(times[0] / times[2] - 1.0, times[1] / times[2] - 1.0)


def _samples_of(costs: Costs, step: int, count: int) -> Costs:
    return costs[np.arange(step * count, (step + 1) * count) % len(costs)]


def _plan_s(costs: Costs) -> float:
    own, dealing = _samples_of(costs, 0, PLANNED_SAMPLES), Dealing(PLANNED_SAMPLES, REPLICAS)
    seconds = []
    for _ in range(PLAN_ROUNDS):
        began = time.process_time()
        balanced_order(own, dealing, 1)
        seconds.append(time.process_time() - began)
    return round(statistics.median(seconds), 5)


def _row(documents: str, seq_len: int, what: str, found: ImbalanceLoss) -> dict[str, Any]:
    return {
        "documents": documents,
        "seq_len": seq_len,
        "step": what,
        "in order": found.in_order,
        "by cost": found.by_cost,
        "saved": found.saved,
    }
