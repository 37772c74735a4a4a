"""Decides when the gradients of a bucket are whole, by counting writes.

Backward writes to a parameter's gradient once per micro-batch for each use of the parameter: twice where both ends of a
tied model are on one stage, later where a schedule defers wgrads. How often is declared when the chunk is built
(LogicalParameter.num_writes), not learned from a step. A bucket is whole when each of its parameters has all its
writes. Buckets start in their own order, even if a later one is whole first, so all ranks start them in the same order.
A bucket with a parameter that may get no gradient at all is never whole early, and stays out of that order.
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
        """By bucket, the number of parameters whose gradients are not whole."""
        self._num_microbatches = 0
        self.early = [number for number, bucket in enumerate(buckets) if all(one.num_writes for one in bucket)]
        """The buckets that may start before the end of the window, in the order in which they start."""
        self.begin(0)

    def begin(self, num_microbatches: int) -> None:
        """Begin a window."""
        self._num_microbatches = num_microbatches
        self._writes = [[0] * len(bucket) for bucket in self._buckets]
        self._num_missing = [len(bucket) for bucket in self._buckets]

    def note(self, bucket: int, index: int) -> None:
        """Count one finished write.

        Raises: RuntimeError for one more write than declared: the bucket's reduction may have started without it.
        """
        logical = self._buckets[bucket][index]
        expected = logical.num_writes * self._num_microbatches
        self._writes[bucket][index] += 1
        if expected and self._writes[bucket][index] > expected:
            raise RuntimeError(
                f"the gradient of {logical.name} is written {self._writes[bucket][index]} times in "
                f"{self._num_microbatches} micro-batches, and {expected} writes are declared: a module uses the "
                "parameter once more than the plan of the chunk knows (parallel/tensor_plan.py), or use "
                "parallel.overlap=false"
            )
        self._num_missing[bucket] -= self._writes[bucket][index] == expected

    def is_whole(self, bucket: int) -> bool:
        """Return whether nothing more will be written to the bucket in this window."""
        return not self._num_missing[bucket]
