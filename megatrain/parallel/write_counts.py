"""Counts the writes to gradients, to find out when the reduction of a bucket may start.

The reduction may start when the bucket's gradients are complete. Backward writes to a parameter's gradient once per
micro-batch for each use of the parameter: twice if a stage has both the embedding and the head of a model with tied
embeddings. If the schedule defers wgrads, these writes come after backward. The number of writes is declared when the
chunk is built (LogicalParameter.num_writes), not measured in a step. A bucket is complete when each of its parameters
has all its writes. A bucket with a parameter that may get no gradient is never complete early. Reductions start in one
fixed order, even if a later bucket is complete first: those that may start early, then the others. Reductions that have
not started at the end of a window start then, in the same order. So the order is the same on all ranks, even if a rank
lacks a declared write.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.parallel.sharding import LogicalParameter


class WriteCounts:
    """Counts the writes to one chunk's gradients in a window: the micro-batches before one reduction."""

    def __init__(self, buckets: Sequence[Sequence[LogicalParameter]]) -> None:
        """buckets: the parameters of each bucket."""
        self._buckets = buckets
        self._writes: list[list[int]] = []
        self._num_missing: list[int] = []
        """By bucket, the number of parameters whose gradients are not complete."""
        self._num_microbatches = 0
        early = [number for number, bucket in enumerate(buckets) if all(logical.num_writes for logical in bucket)]
        self.num_early = len(early)
        self.order = (*early, *(number for number in range(len(buckets)) if number not in early))
        """The order in which reductions start; only the first `num_early` may start before the end of the window."""
        self.begin(0)

    def begin(self, num_microbatches: int) -> None:
        """Begin a window."""
        self._num_microbatches = num_microbatches
        self._writes = [[0] * len(bucket) for bucket in self._buckets]
        self._num_missing = [len(bucket) for bucket in self._buckets]

    def count(self, bucket: int, index: int) -> None:
        """Count one write.

        Raises: RuntimeError for one more write than declared: the bucket's reduction may have started without it.
        """
        logical = self._buckets[bucket][index]
        expected = logical.num_writes * self._num_microbatches
        self._writes[bucket][index] += 1
        if expected and self._writes[bucket][index] > expected:
            raise RuntimeError(
                f"the gradient of {logical.name} is written {self._writes[bucket][index]} times in "
                f"{self._num_microbatches} micro-batch{'es' if self._num_microbatches > 1 else ''}, and {expected} "
                f"{'writes are' if expected > 1 else 'write is'} declared: a module uses the "
                "parameter more often than the tensor plan has counted (parallel/tensor_plan.py); correct the count or "
                "use parallel.overlap=false"
            )
        self._num_missing[bucket] -= self._writes[bucket][index] == expected

    def is_complete(self, bucket: int) -> bool:
        """Return whether nothing more will be written to the bucket in this window."""
        return not self._num_missing[bucket]
