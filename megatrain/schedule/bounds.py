"""Closed forms: what a schedule costs in idle time and in activations held, without building it.

Bubble: with free communication and model chunks of equal duration (tf forward, tb backward, any values), every stage
computes for num_microbatches * num_chunks * (tf + tb) and idles for (pp_size - 1) * (tf + tb), whatever the number of
microbatches. So, per token, a batch 4 times as large has a quarter of the bubble: 75 % less, which is what we state
for LAMB's larger batches where MegaScale sec. 3.1 claims 87.5 %.
"""

from __future__ import annotations

from megatrain.contracts.errors import TopologyError
from megatrain.schedule.feasibility import infeasibility
from megatrain.schedule.gpipe import gpipe_in_flight
from megatrain.schedule.interleaved import interleaved_in_flight
from megatrain.schedule.one_f_one_b import one_f_one_b_in_flight


def require_feasible(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> None:
    """Raise TopologyError with the rule and the way out when this pipeline cannot be built."""
    problem = infeasibility(name, pp_size, num_chunks, num_microbatches)
    if problem is not None:
        raise TopologyError(problem)


def bubble_fraction(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> float:
    """Return the idle time of a stage in a step divided by its compute time, (pp_size - 1) / (chunks * microbatches).

    Raises: TopologyError when the pipeline cannot be built.
    """
    require_feasible(name, pp_size, num_chunks, num_microbatches)
    return (pp_size - 1) / (num_chunks * num_microbatches)


def in_flight_bound(name: str, pp_size: int, num_chunks: int, num_microbatches: int) -> tuple[int, ...]:
    """Return, by stage, the most activations held at once, in microbatches of one chunk.

    Raises: TopologyError when the pipeline cannot be built.
    """
    require_feasible(name, pp_size, num_chunks, num_microbatches)
    if name == "gpipe":
        return gpipe_in_flight(pp_size, num_microbatches)
    if name == "1f1b":
        return one_f_one_b_in_flight(pp_size, num_microbatches)
    return interleaved_in_flight(pp_size, num_chunks, num_microbatches)
