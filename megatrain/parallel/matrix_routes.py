"""How the parts of each whole matrix are sent from the shards to one owner rank, and back.

The ranks of a stage form a grid: replicas along one side, the parts of the cut axis along the other. A matrix is spread
over the shards of several replicas of each part. Its values first go to the owner's row, along the replicas, and then
to the owner, along the cut axis. Results take the same way back. So two all-to-alls over the existing groups reach
every rank. If several ranks hold the same part, each of them sends and receives it. Every rank computes the same routes
without communication. Pure functions: no I/O and no clock, and no import of torch.
Source: after the distributed Muon of Moonlight (arXiv:2502.16982), which gathers over dp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatrain.parallel.boxes import Box, boxes_of_range, shared_box
from megatrain.parallel.logical_matrices import HiddenWeight, LogicalMatrix, owners_of


@dataclass(frozen=True, slots=True)
class PlacedWeight:
    """A hidden weight in a bucket. start: where its tensor begins in the bucket, the same on every rank."""

    bucket: int
    shard_numel: int
    start: int
    weight: HiddenWeight


@dataclass(frozen=True, slots=True)
class Region:
    """Values of a matrix in one shard: `box` of the parameter, within `around`, which is contiguous in the shard.

    flat: where `around` begins in the shard of bucket number `bucket`.
    """

    bucket: int
    flat: int
    around: Box
    box: Box


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A matrix that this rank owns. parts: (where a part begins in the received data, its box of the parameter)."""

    matrix: LogicalMatrix
    parts: tuple[tuple[int, Box], ...]


@dataclass(frozen=True, slots=True)
class Hop:
    """The sizes of the parts of one all-to-all, for each rank of the group."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    def num_to_others(self, rank: int) -> int:
        """Return how many elements this rank sends to other ranks, in both directions."""
        return sum(self.sent) - self.sent[rank] + sum(self.received) - self.received[rank]


@dataclass(frozen=True, slots=True)
class MatrixRoutes:
    """The routes of one rank.

    regions: what this rank sends along the replicas, with the matrix, in the order of sending. spans: the slices of the
    data received from the replicas, in the order in which they are sent along the cut axis.
    """

    regions: tuple[tuple[LogicalMatrix, Region], ...]
    along_replicas: Hop
    spans: tuple[slice, ...]
    along_cut: Hop
    owned: tuple[OwnedMatrix, ...]


def matrix_routes(
    weights: Sequence[PlacedWeight],
    cost: Callable[[LogicalMatrix], float],
    grid: tuple[int, int],
    place: tuple[int, int],
) -> MatrixRoutes:
    """Return the routes of the rank at `place` of a grid of (replicas, parts). cost: the cost of one matrix.

    Raises: ValueError when the parts of a weight are not the whole weight, each of its values once.
    """
    for placed in weights:
        _check_parts(placed.weight)
    (num_replicas, num_parts), (own_row, own_part) = grid, place
    numbered = [(weight, matrix) for weight in weights for matrix in weight.weight.matrices]
    owners = [
        divmod(owner, num_parts)
        for owner in owners_of([matrix for _, matrix in numbered], cost, num_replicas * num_parts)
    ]
    by_row: list[list[int]] = [[] for _ in range(num_replicas)]
    for number in sorted(range(len(numbered)), key=lambda number: (owners[number], number)):
        by_row[owners[number][0]].append(number)

    def regions(number: int, replica: int, part: int) -> Iterator[Region]:
        weight, matrix = numbered[number]
        return _regions(weight, matrix, replica, part)

    def numel(number: int, replica: int, part: int) -> int:
        return sum(region.box.numel for region in regions(number, replica, part))

    sent = [[(number, region) for number in row for region in regions(number, own_row, own_part)] for row in by_row]
    arriving = {
        (replica, number): numel(number, replica, own_part)
        for number in by_row[own_row]
        for replica in _replicas_of(numbered[number][0])
    }
    received = [0] * num_replicas
    to_part = [[0] * num_replicas for _ in range(num_parts)]
    for (replica, number), count in arriving.items():
        received[replica] += count
        to_part[owners[number][1]][replica] += count
    own_numbers = [number for number in by_row[own_row] if owners[number][1] == own_part]
    owned, from_part = _arrivals(
        own_numbers, num_replicas, num_parts, regions, [_replicas_of(weight) for weight, _ in numbered]
    )
    return MatrixRoutes(
        regions=tuple((numbered[number][1], placed) for row in sent for number, placed in row),
        along_replicas=Hop(tuple(sum(placed.box.numel for _, placed in row) for row in sent), tuple(received)),
        spans=tuple(_spans(to_part, received)),
        along_cut=Hop(tuple(map(sum, to_part)), from_part),
        owned=tuple(OwnedMatrix(numbered[number][1], tuple(parts)) for number, parts in owned.items()),
    )


def _check_parts(weight: HiddenWeight) -> None:
    """Raise ValueError unless the boxes of `weight` tile each of its matrices. Several ranks may hold one box."""
    boxes = {box for of_part in weight.boxes for box in of_part}
    for matrix in weight.matrices:
        shared = (shared_box(box, matrix.box) for box in boxes)
        num_held = sum(box.numel for box in shared if box is not None)
        if num_held != matrix.box.numel:
            name = f"matrix {matrix.name} of {matrix.parameter}" if matrix.name else matrix.parameter
            raise ValueError(
                f"the {len(weight.boxes)} ranks along {weight.axis} hold {num_held} values of {name}, which has "
                f"{matrix.box.numel}; together they must hold each value once: name the axis that cuts the parameter "
                "in its row of the placement table (parallel/decoder.py)"
            )


def _regions(placed: PlacedWeight, matrix: LogicalMatrix, replica: int, part: int) -> Iterator[Region]:
    """Yield the regions of a matrix that are in one rank's shard, in the order of memory."""
    start, shard = placed.start, replica * placed.shard_numel
    for held in placed.weight.boxes[part]:
        first, last = max(start, shard), min(start + held.numel, shard + placed.shard_numel)
        if first < last:
            for position, within in boxes_of_range(held.sizes, first - start, last - start):
                around = within.shifted(held.offsets)
                box = shared_box(around, matrix.box)
                if box is not None:
                    yield Region(placed.bucket, start + position - shard, around, box)
        start += held.numel


def _replicas_of(placed: PlacedWeight) -> range:
    """Return the replicas whose shards hold some of a weight."""
    numel = sum(box.numel for box in placed.weight.boxes[0])
    return range(placed.start // placed.shard_numel, (placed.start + numel - 1) // placed.shard_numel + 1)


def _spans(to_part: Sequence[Sequence[int]], received: Sequence[int]) -> Iterator[slice]:
    """Yield the slices of the data received from the replicas, for one part of the cut axis after the other.

    to_part: for each part and replica, how many elements from the replica are sent on to the part.
    """
    at = [sum(received[:replica]) for replica in range(len(received))]
    for counts in to_part:
        for replica, count in enumerate(counts):
            if count:
                yield slice(at[replica], at[replica] + count)
            at[replica] += count


def _arrivals(
    own_numbers: Sequence[int],
    num_replicas: int,
    num_parts: int,
    regions: Callable[[int, int, int], Iterator[Region]],
    replicas_of: Sequence[range],
) -> tuple[dict[int, list[tuple[int, Box]]], tuple[int, ...]]:
    """Return where each own matrix's parts are in the data received along the cut axis, and the size from each rank.

    From each part of the axis, the shards of one replica after the other arrive, each with its parts of all matrices.
    """
    owned: dict[int, list[tuple[int, Box]]] = {number: [] for number in own_numbers}
    at, ends = 0, [0]
    for part in range(num_parts):
        for replica in range(num_replicas):
            for number in (number for number in own_numbers if replica in replicas_of[number]):
                for region in regions(number, replica, part):
                    owned[number].append((at, region.box))
                    at += region.box.numel
        ends.append(at)
    return owned, tuple(stop - start for start, stop in pairwise(ends))
