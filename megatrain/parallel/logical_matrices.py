"""The logical matrices of a hidden weight, and the rank that computes with each of them as a whole.

An update rule such as Muon needs whole matrices. The single-device model's weight is a tensor in which several matrices
may be fused: the queries of all heads, all keys and all values are one matrix each, and so are gate and up of the mlp.
The outputs of a matrix are its rows, its inputs are its columns. Pure functions: no I/O and no clock, and no import of
torch.
Source: one matrix for each of q, k and v, as Keller Jordan, Muon, 2024, advises.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from megatrain.parallel.boxes import Box
from megatrain.parallel.placement import Fused


@dataclass(frozen=True, slots=True)
class LogicalMatrix:
    """One matrix: a box of the parameter. The last dim of the box has the inputs.

    name: the name of the matrix in a fused parameter (`q`), else empty.
    """

    parameter: str
    name: str
    box: Box

    @property
    def num_rows(self) -> int:
        return prod(self.box.sizes[:-1])

    @property
    def num_columns(self) -> int:
        return self.box.sizes[-1]


@dataclass(frozen=True, slots=True)
class HiddenWeight:
    """The matrices of one parameter, and what each rank along the axis that cuts it holds of the parameter.

    boxes: for each of these ranks, the boxes that lie one after another in its tensor, with the same total size. axis:
    the axis that cuts the parameter; if none does, ranks along it share the work.
    """

    matrices: tuple[LogicalMatrix, ...]
    boxes: tuple[tuple[Box, ...], ...]
    axis: str


def matrices_of(name: str, shape: Sequence[int], fused: Fused | None) -> tuple[LogicalMatrix, ...]:
    """Return the matrices of a parameter, in the order of their names in `fused`."""
    whole = Box((0,) * len(shape), tuple(shape))
    if fused is None:
        return (LogicalMatrix(name, "", whole),)

    def part(start: int, stop: int) -> Box:
        offsets, sizes = list(whole.offsets), list(whole.sizes)
        offsets[fused.dim], sizes[fused.dim] = start, stop - start
        return Box(tuple(offsets), tuple(sizes))

    return tuple(LogicalMatrix(name, part_name, part(*ends)) for part_name, ends in fused.ranges(shape).items())


def owners_of(
    matrices: Sequence[LogicalMatrix], cost: Callable[[LogicalMatrix], float], num_ranks: int
) -> tuple[int, ...]:
    """Return for each matrix the rank, below `num_ranks`, that computes with it. The result is the same on every rank.

    Matrices are assigned in the order of decreasing cost, each to the rank with the least work so far (the lowest such
    rank).
    """
    owners = [0] * len(matrices)
    loads = [(0.0, rank) for rank in range(num_ranks)]
    costs = [cost(matrix) for matrix in matrices]
    for number in sorted(range(len(matrices)), key=lambda number: (-costs[number], number)):
        load, owner = loads[0]
        owners[number] = owner
        heapq.heapreplace(loads, (load + costs[number], owner))
    return tuple(owners)
