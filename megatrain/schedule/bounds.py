"""Closed forms: what a schedule costs in idle time and in activations held, without building it.

Bubble: with free communication and model chunks of equal duration (tf forward, tb backward, any values), every stage
computes for num_microbatches * num_chunks * (tf + tb) and idles for (pp_size - 1) * (tf + tb), whatever the number of
microbatches. Where backward is split (ti for the input, tw for the weights, any values) and weights' halves fill the
bubble, it idles for (pp_size - 1) * (tf + ti - min(tf, ti, tw)): the paper's tf + ti - tw where weights' halves are the
shortest, else the longer of the two others. So, per token, a batch 4 times as large has a quarter of the bubble: 75 %
less, which is what we state for LAMB's larger batches where MegaScale sec. 3.1 claims 87.5 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.errors import TopologyError
from megatrain.schedule.feasibility import infeasibility
from megatrain.schedule.gpipe import gpipe_in_flight
from megatrain.schedule.interleaved import interleaved_in_flight
from megatrain.schedule.one_f_one_b import one_f_one_b_in_flight
from megatrain.schedule.zero_bubble import zero_bubble_in_flight


@dataclass(frozen=True, slots=True)
class ComputeDurations:
    """How long the computes of a model chunk take for one microbatch, in any one unit; backward is both its halves."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


EQUAL_DURATIONS = ComputeDurations(1, 1, 1)
"""As many multiplications each: those of a product with a weight, and of its two products in backward."""


def require_feasible(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> None:
    """Raise TopologyError with the rule and the way out when this pipeline cannot be built."""
    problem = infeasibility(name, pp_size, num_chunks, num_microbatches)
    if problem is not None:
        raise TopologyError(problem)


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
    require_feasible(name, pp_size, num_chunks, num_microbatches)
    num_computes = num_chunks * num_microbatches
    if name != "zero_bubble":
        return (pp_size - 1) / num_computes
    filled = min(durations.forward, durations.backward_input, durations.backward_weight)
    idle = (pp_size - 1) * (durations.forward + durations.backward_input - filled)
    return idle / (num_computes * durations.total)


def in_flight_bound(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> tuple[int, ...]:
    """Return, by stage, the most activations held at once, in microbatches of one chunk.

    Raises: TopologyError when the pipeline cannot be built.
    """
    require_feasible(name, pp_size, num_chunks, num_microbatches)
    if name == "gpipe":
        return gpipe_in_flight(pp_size, num_microbatches)
    if name == "1f1b":
        return one_f_one_b_in_flight(pp_size, num_microbatches)
    if name == "zero_bubble":
        return zero_bubble_in_flight(pp_size)
    return interleaved_in_flight(pp_size, num_chunks, num_microbatches)
