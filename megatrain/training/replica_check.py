"""A runtime check: the ranks of a replica group hold the same parameters, bit by bit.

Each rank makes a checksum of every bucket, and all ranks that hold the same bucket compare them: the ranks of its
replica group, and the ranks along other axes that do not cut the model. One number per bucket is sent. If two checksums
differ, checksums of the bucket's parameters show which parameters differ. The check reads the parameters that a step
has computed with, after its gathers and before the optimizer writes again, so it waits for no gather. Every gather
overwrites everything except the owner's shard. Damage outside that shard is not found if a gather repairs it before the
next comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import ReplicaError
from megatrain.contracts.layout import first_axis_of
from megatrain.formatting import names_text, ranks_text
from megatrain.parallel.bucket import Bucket
from megatrain.training.rank_model import RankModel

_Numbered = tuple[int, Bucket]
"""The number of a chunk, and one of its buckets."""
_MAX_NAMED = 8
PIECE_WORDS = 2**20
"""The size of a piece: its products take 8 MiB while they are summed, for memory of any size."""
_BASE = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio. It is odd, so that no digit is lost."""


class ReplicaCheck:
    """Compares every `interval` steps; steps are counted from 1."""

    def __init__(self, interval: int, rank_model: RankModel) -> None:
        self._interval = interval
        self._rank_model = rank_model
        self._checksums = Checksums(rank_model.device)
        self._equal_at = 0

    def is_due(self, step: int) -> bool:
        return step % self._interval == 0

    def check(self, step: int) -> None:
        """Compare the parameters that `step` has computed with. Every chunk's gather must have ended.

        Raises: ReplicaError on every rank of the job, naming the differences found by the lowest rank that found any.
        Communication: one all-gather of 8 bytes per bucket along each axis of replicas, on host memory, and a small
        all-reduce per axis; more where ranks differ.
        """
        mesh = self._rank_model.mesh
        by_axes: dict[tuple[str, ...], list[_Numbered]] = {}
        for chunk in self._rank_model.data_parallel:
            for bucket in chunk.buckets:
                axes = mesh.layout.replica_axes(first_axis_of(bucket.replicas.name))
                by_axes.setdefault(axes, []).append((chunk.number, bucket))
        # every group compares, even if an earlier one found a difference, because not all ranks have found it
        problems = [self._compared(step, axes, buckets) for axes, buckets in by_axes.items()]
        problem = next(filter(None, problems), None)
        is_bad = torch.tensor(float(problem is not None), device=self._rank_model.device)
        if mesh.sum_over_all(is_bad).item():
            raise ReplicaError(mesh.cpu_groups.agree(mesh.rank, problem))
        self._equal_at = step

    def _compared(self, step: int, axes: tuple[str, ...], buckets: Sequence[_Numbered]) -> str | None:
        """Return the difference among the ranks along `axes`, or None; the same on each of these ranks."""
        by_rank = self._gathered(axes, [self._checksums.of(bucket.values) for _, bucket in buckets])
        differing = [index for index, column in enumerate(zip(*by_rank, strict=True)) if len(set(column)) > 1]
        return self._problem(step, axes, [buckets[index] for index in differing]) if differing else None

    def _problem(self, step: int, axes: tuple[str, ...], buckets: Sequence[_Numbered]) -> str:
        """Return a text that names the differing parameters of these buckets, and the ranks in the minority."""
        names, sums = [], []
        for chunk, bucket in buckets:
            stops = [*bucket.starts[1:], bucket.starts[-1] + bucket.parameters[-1].parameter.numel()]
            parts = [
                (logical.name, *ends) for logical, *ends in zip(bucket.parameters, bucket.starts, stops, strict=True)
            ]
            # the padding of a bucket is gathered too
            for name, start, stop in [*parts, (f"padding after {parts[-1][0]}", stops[-1], bucket.numel)]:
                names.append(f"{name} (chunk {chunk})")
                sums.append(self._checksums.of(bucket.values[start:stop]))
        by_rank = self._gathered(axes, sums)
        columns = list(zip(*by_rank, strict=True))
        found = [name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]
        members = self._rank_model.mesh.layout.ranks_along(self._rank_model.mesh.rank, *axes)
        all_ranks, odd = ranks_text(members, _MAX_NAMED), differing_rows(by_rank)
        who = f"the replicas on {all_ranks} have no majority, so the wrong one is unknown"
        if odd:
            differ = f"{ranks_text([members[row] for row in odd], _MAX_NAMED)} differ{'s' if len(odd) == 1 else ''}"
            who = f"{differ} from most of the replicas on {all_ranks}"
        equal_at = (
            f"last found equal at step {self._equal_at}" if self._equal_at else "never found equal by this process"
        )
        healthy = f"step {self._equal_at}" if self._equal_at else "this process"
        return (
            f"parameters differ at step {step} in {names_text(found, _MAX_NAMED)}: {who} "
            f"(train.checksum_interval={self._interval}, {equal_at}); check the memory and the "
            f"network of their hosts, and resume from a save that is older than {healthy}"
        )

    def _gathered(self, axes: tuple[str, ...], checksums: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Return the checksums of each rank along `axes`, in the order of these ranks."""
        cpu_groups = self._rank_model.mesh.cpu_groups
        return cpu_groups.all_gather(axes, torch.stack(list(checksums)).cpu(), Operation.CHECKSUM)


def differing_rows(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the indices of the rows that differ from the majority; None if there is no majority."""
    common, count = Counter(rows).most_common(1)[0]
    if 2 * count <= len(rows):
        return None
    return tuple(index for index, row in enumerate(rows) if row != common)


class Checksums:
    """Computes checksums of memory on one device, which show whether two ranks hold the same bytes.

    The words of a piece of memory are multiplied by odd pseudo-random numbers, one for each position, and summed modulo
    2^64. The sums of the pieces are combined as the digits of one number. A single changed word always changes the
    checksum, because multiplying by an odd factor loses no bits. Nearly every other change does too, including swapped
    words. A sum of integers does not depend on the order, so the checksum does not depend on the device.
    Source: after multilinear hashing (Carter and Wegman, 1979).
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the same factors on every rank
        factors = torch.randint(-(2**63), 2**63 - 1, (PIECE_WORDS,), generator=generator, dtype=torch.int64)
        self._factors = (factors | 1).to(device)

    def of(self, x: Tensor) -> Tensor:
        """Return the checksum of the bits of flat, contiguous `x`, on its device.

        Shapes: x [n]; result [], int64.
        """
        # words of 32 bits at most: changes of the sign bits of two 64-bit words would cancel out
        words = x.detach().view({1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32))
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        for piece in words.split(PIECE_WORDS):
            total = total * _BASE + (piece * self._factors[: piece.numel()]).sum()
        return total
