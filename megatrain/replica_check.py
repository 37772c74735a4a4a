"""A runtime check: the ranks of a replica group hold the same parameters, bit by bit.

Each rank makes a checksum of every bucket, and all ranks that hold the same bucket compare them: those of its replica
group, and of axes beside it that do not cut the model either. One number a bucket travels.
Where two differ, checksums of their parameters say in which. Checked is what a step has computed with, after its
gathers and before the optimizer writes again: so this waits for no gather. Every gather mends what was wrong beside the
owner's share, and is not compared: what does not last until the next comparison is not found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.assembly import Replica
from megatrain.comm.group import brief
from megatrain.contracts.errors import ReplicaError
from megatrain.contracts.operations import Operation
from megatrain.parallel.bucket import Bucket
from megatrain.parallel.checksum import Checksums

_Numbered = tuple[int, Bucket]
"""A bucket, after the number of its chunk."""
_MOST_NAMED = 8


class ReplicaCheck:
    """Compares every `interval` steps; steps are counted from 1."""

    def __init__(self, interval: int, replica: Replica) -> None:
        self._interval = interval
        self._replica = replica
        self._checksums = Checksums(replica.device)
        self._equal_at = 0

    def is_due(self, step: int) -> bool:
        return step % self._interval == 0

    def check(self, step: int) -> None:
        """Compare the parameters that `step` has computed with. Every chunk's gather must have ended.

        Raises: ReplicaError on every rank of the job, naming what differs among the first ranks where something does.
        Communication: one gather of 8 bytes a bucket along each axis of replicas, on host memory; a small all-reduce
        an axis. More where ranks differ.
        """
        mesh = self._replica.mesh
        by_axes: dict[tuple[str, ...], list[_Numbered]] = {}
        for chunk in self._replica.data_parallel:
            for bucket in chunk.buckets:
                axes = mesh.layout.replica_axes(bucket.replicas.name)
                by_axes.setdefault(axes, []).append((chunk.number, bucket))
        # all compare, also when others before them have found something: they may not all know of that
        problems = [self._compared(step, axes, buckets) for axes, buckets in by_axes.items()]
        problem = next(filter(None, problems), None)
        is_bad = torch.tensor(float(problem is not None), device=self._replica.device)
        if mesh.sum_over_all(is_bad).item():
            raise ReplicaError(mesh.host.agree(mesh.rank, problem))
        self._equal_at = step

    def _compared(self, step: int, axes: tuple[str, ...], buckets: Sequence[_Numbered]) -> str | None:
        """Return what differs among the ranks along `axes`, on each of them the same."""
        by_rank = self._gathered(axes, [self._checksums.of(bucket.values) for _, bucket in buckets])
        differing = [place for place, column in enumerate(zip(*by_rank, strict=True)) if len(set(column)) > 1]
        return self._problem(step, axes, [buckets[place] for place in differing]) if differing else None

    def _problem(self, step: int, axes: tuple[str, ...], buckets: Sequence[_Numbered]) -> str:
        """Return in which parameters of differing buckets there are differences, and whose they are."""
        names, sums = [], []
        for chunk, bucket in buckets:
            stops = [*bucket.starts[1:], bucket.starts[-1] + bucket.parameters[-1].parameter.numel()]
            parts = [
                (logical.name, *ends) for logical, *ends in zip(bucket.parameters, bucket.starts, stops, strict=True)
            ]
            # what fills up a bucket is gathered, too
            for name, start, stop in [*parts, (f"padding after {parts[-1][0]}", stops[-1], bucket.numel)]:
                names.append(f"{name} (chunk {chunk})")
                sums.append(self._checksums.of(bucket.values[start:stop]))
        by_rank = self._gathered(axes, sums)
        columns = list(zip(*by_rank, strict=True))
        found = [name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]
        shown = ", ".join(found[:_MOST_NAMED]) + (
            f" and {len(found) - _MOST_NAMED} more" if found[_MOST_NAMED:] else ""
        )
        members = self._replica.mesh.layout.ranks_along(self._replica.mesh.rank, *axes)
        everybody, odd = brief(members), odd_rows(by_rank)
        who = f"of the replicas on ranks {everybody} no majority agrees, so who is wrong is not known"
        if odd:
            ranks = tuple(members[row] for row in odd)
            verb = "ranks {} differ" if len(ranks) > 1 else "rank {} differs"
            who = f"{verb.format(brief(ranks))} from most of the replicas on ranks {everybody}"
        equal_at = f"step {self._equal_at}" if self._equal_at else "no step of this process"
        return (
            f"parameters differ at step {step} in {shown}: {who} (train.checksum_interval={self._interval}, last "
            f"found equal at {equal_at}); check the memory and the network of their hosts, and go back to before that "
            f"step"
        )

    def _gathered(self, axes: tuple[str, ...], checksums: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Return the numbers of each rank along `axes`, in their order."""
        host = self._replica.mesh.host
        return host.all_gather(axes, torch.stack(list(checksums)).cpu(), Operation.CHECKSUM)


def odd_rows(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the places of the rows that are not what more than half of them are; None where no row is that."""
    common, count = Counter(rows).most_common(1)[0]
    if 2 * count <= len(rows):
        return None
    return tuple(place for place, row in enumerate(rows) if row != common)
