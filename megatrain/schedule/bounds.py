"""Closed forms: the idle time and the activations held of a schedule, without building it.

Bubble: with free communication and model chunks of equal duration (tf forward, tb backward, any values), every stage
computes for num_microbatches * num_chunks * (tf + tb) and idles for (pp_size - 1) * (tf + tb), for any number of
micro-batches. Where backward is split (ti for dgrad, tw for wgrad, any values) and wgrads fill the bubble, a stage
idles for (pp_size - 1) * (tf + ti - min(tf, ti, tw)). That is the paper's tf + ti - tw if wgrads are the shortest, and
else the longer of tf and ti. So, per token, a batch 4 times as large has a quarter of the bubble: 75 % less. That is
our number for LAMB's larger batches, where MegaScale sec. 3.1 claims 87.5 %.
"""

from __future__ import annotations

from megatrain.schedule.durations import EQUAL_DURATIONS, ComputeDurations
from megatrain.schedule.kinds import require_feasible


def bubble_fraction(
    name: str,
    pp_size: int,
    num_chunks: int,
    num_microbatches: int,
    durations: ComputeDurations = EQUAL_DURATIONS,
) -> float:
    """Return the idle time of a stage in a step divided by its compute time, with free communication.

    The result is (pp_size - 1) / (chunks * micro-batches) for all durations. For zero_bubble it is that value times
    (tf + ti - min(tf, ti, tw)) / (tf + ti + tw).
    Raises: TopologyError when the pipeline cannot be built.
    """
    kind = require_feasible(name, pp_size, num_chunks, num_microbatches)
    return (pp_size - 1) * kind.idle(durations) / (num_chunks * num_microbatches * durations.total)


def in_flight_bound(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the most activations that each stage holds at once, in micro-batches of one chunk.

    Raises: TopologyError when the pipeline cannot be built.
    """
    kind = require_feasible(name, pp_size, num_chunks, num_microbatches)
    return kind.in_flight(kind.placement(pp_size, num_chunks), num_microbatches)
