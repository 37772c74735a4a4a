"""Orthogonalizes the matrices in shards: each is gathered to one rank, processed there, and returned to the shards.

matrix_routes.py computes the routes. The matrices are assigned to ranks so that each rank has about the same FLOPs.
Weights with other replicas, or cut along another axis, have a separate exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation
from megatrain.ops.orthogonalize import orthogonalized, orthogonalizing_flops
from megatrain.parallel.boxes import Box
from megatrain.parallel.bucket import Bucket
from megatrain.parallel.logical_matrices import LogicalMatrix
from megatrain.parallel.matrix_routes import MatrixRoutes, OwnedMatrix, PlacedWeight, Region, matrix_routes

_EXCHANGE = Operation.UPDATES_ALL_TO_ALL


class MatrixExchange:
    """The matrices of weights with the same replicas that are cut along the same axis.

    cut: the group along that axis. dtype: the dtype in which matrices are sent and orthogonalized.
    """

    def __init__(self, weights: Sequence[PlacedWeight], replicas: Group, cut: Group, dtype: torch.dtype) -> None:
        self._weights = tuple(weights)
        self._replicas, self._cut = replicas, cut
        self._dtype = dtype

    @cached_property
    def routes(self) -> MatrixRoutes:
        """This rank's routes, computed at their first use: a checkpoint that is planned for many ranks needs none."""
        replicas, cut = self._replicas, self._cut
        return matrix_routes(self._weights, _cost, (replicas.size, cut.size), (replicas.rank, cut.rank))

    @property
    def bytes_sent(self) -> dict[str, int]:
        """The bytes that this rank sends to other ranks in one exchange, in both directions, by group name."""
        hops = ((self._replicas, self.routes.along_replicas), (self._cut, self.routes.along_cut))
        return {group.name: hop.num_to_others(group.rank) * self._dtype.itemsize for group, hop in hops}

    def orthogonalize_(self, shards: Sequence[Tensor], scale: Callable[[LogicalMatrix], float]) -> None:
        """Replace each matrix in `shards`, flat memory of each bucket's shard, by scale * the orthogonal matrix.

        shards: one for each bucket from which the exchanges were made; other values in them do not change. The scale is
        applied in the dtype of the shards.
        Communication: two all-to-alls over the replicas and two over the cut axis; blocks. Along the replicas a rank
        sends its shards, and returns the results of the matrices of its row; along the cut axis it sends its part of
        these matrices, and returns the results of the matrices that it owns.
        """
        # without local variables, so that each step frees the tensors of the step before it
        self._return(self._orthogonalized(self._gathered(shards)), shards, scale)

    def _orthogonalized(self, arrived: Tensor) -> Tensor:
        """Overwrite `arrived`, the parts of this rank's own matrices, with those of orthogonal matrices. Return it."""
        for owned in self.routes.owned:
            whole = arrived.new_empty(owned.matrix.box.sizes)
            for part, box in _owned_parts(arrived, owned):
                whole[box.slices(owned.matrix.box.offsets)] = part
            whole = orthogonalized(whole.view(owned.matrix.num_rows, -1)).reshape(owned.matrix.box.sizes)
            for part, box in _owned_parts(arrived, owned):
                part.copy_(whole[box.slices(owned.matrix.box.offsets)])
        return arrived

    def _gathered(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the parts of the matrices that this rank owns."""
        first, second, spans = self.routes.along_replicas, self.routes.along_cut, self.routes.spans
        parts = self._replicas.all_to_all(self._packed(shards), _EXCHANGE, first.sent, first.received).wait()
        if self._cut.size == 1:
            return parts  # owned.parts are positions in this tensor
        parts = torch.cat([parts[span] for span in spans]) if spans else parts
        return self._cut.all_to_all(parts, _EXCHANGE, second.sent, second.received).wait()

    def _packed(self, shards: Sequence[Tensor]) -> Tensor:
        packed = torch.empty(sum(self.routes.along_replicas.sent), dtype=self._dtype, device=shards[0].device)
        for (_, region), part in zip(self.routes.regions, self._parts(packed), strict=True):
            part.copy_(_view(shards, region))
        return packed

    def _return(self, results: Tensor, shards: Sequence[Tensor], scale: Callable[[LogicalMatrix], float]) -> None:
        """Send the results to where the parts came from."""
        first, second = self.routes.along_replicas, self.routes.along_cut
        if self._cut.size > 1:
            sorted_by_part = self._cut.all_to_all(results, _EXCHANGE, second.received, second.sent).wait()
            results, at = torch.empty_like(sorted_by_part), 0
            for span in self.routes.spans:
                count = span.stop - span.start
                results[span] = sorted_by_part[at : at + count]
                at += count
            del sorted_by_part
        results = self._replicas.all_to_all(results, _EXCHANGE, first.received, first.sent).wait()
        for (matrix, region), part in zip(self.routes.regions, self._parts(results), strict=True):
            _view(shards, region).copy_(part).mul_(scale(matrix))

    def _parts(self, packed: Tensor) -> list[Tensor]:
        boxes = [region.box for _, region in self.routes.regions]
        parts = packed.split([box.numel for box in boxes]) if boxes else ()
        return [part.view(box.sizes) for part, box in zip(parts, boxes, strict=True)]


def _cost(matrix: LogicalMatrix) -> float:
    return orthogonalizing_flops(matrix.num_rows, matrix.num_columns)


def _owned_parts(arrived: Tensor, owned: OwnedMatrix) -> Iterator[tuple[Tensor, Box]]:
    for at, box in owned.parts:
        yield arrived[at : at + box.numel].view(box.sizes), box


def matrix_exchanges(buckets: Sequence[Bucket], along: Mapping[str, Group], precision: str) -> list[MatrixExchange]:
    """Return the exchanges of the weights in `buckets`, in the order in which all ranks must make them.

    All parameters of the buckets are hidden weights. along: this rank's groups by axis. precision: "bf16", or "master"
    for the dtype of the summed gradients.
    """
    weights: dict[tuple[str, str], list[PlacedWeight]] = {}
    replicas: dict[str, Group] = {}
    for number, bucket in enumerate(buckets):
        replicas[bucket.replicas.name] = bucket.replicas
        for logical, start in zip(bucket.parameters, bucket.starts, strict=True):
            assert logical.hidden is not None, f"{logical.name} has no logical matrices"
            key = (bucket.replicas.name, logical.hidden.axis)
            weights.setdefault(key, []).append(PlacedWeight(number, bucket.shard_numel, start, logical.hidden))
    dtype = torch.bfloat16 if precision == "bf16" else buckets[0].gradient_dtype
    return [MatrixExchange(found, replicas[name], along[axis], dtype) for (name, axis), found in weights.items()]


def _view(shards: Sequence[Tensor], region: Region) -> Tensor:
    around = shards[region.bucket][region.flat : region.flat + region.around.numel].view(region.around.sizes)
    return around[region.box.slices(region.around.offsets)]
