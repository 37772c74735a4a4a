"""Closed forms: what a schedule costs in idle time and in activations held, without building it.

Bubble: with free communication and model chunks of equal duration (tf forward, tb backward, any values), every stage
computes for num_microbatches * num_chunks * (tf + tb) and idles for (pp_size - 1) * (tf + tb), whatever the number of
microbatches. Where backward is split (ti for the input, tw for the weights, any values) and weights' halves fill the
bubble, it idles for (pp_size - 1) * (tf + ti - min(tf, ti, tw)): the paper's tf + ti - tw where weights' halves are the
shortest, else the longer of the two others. So, per token, a batch 4 times as large has a quarter of the bubble: 75 %
less, which is what we state for LAMB's larger batches where MegaScale sec. 3.1 claims 87.5 %.
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

    (pp_size - 1) / (chunks * microbatches), whatever the durations; for zero_bubble that times
    (tf + ti - min(tf, ti, tw)) / (tf + ti + tw).
    Raises: TopologyError when the pipeline cannot be built.
    """
    kind = require_feasible(name, pp_size, num_chunks, num_microbatches)
    return (pp_size - 1) * kind.idle(durations) / (num_chunks * num_microbatches * durations.total)


def in_flight_bound(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> tuple[int, ...]:
    """Return, by stage, the most activations held at once, in microbatches of one chunk.

    Raises: TopologyError when the pipeline cannot be built.
    """
    kind = require_feasible(name, pp_size, num_chunks, num_microbatches)
    return kind.in_flight(kind.placement(pp_size, num_chunks), num_microbatches)
