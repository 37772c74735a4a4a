"""When the gradients of a bucket are whole, by how often they are written.

Backward writes to the gradient of a parameter once a micro-batch; several times where chunks of the sequence add to it
or two ends of a tied model do; later where a schedule puts products off. So the first step counts, and from then on a
bucket is whole when each of its parameters has as many writes as that. Buckets start in their own order whatever is
whole first: so all ranks start them in the same order, even if they counted differently. A parameter that is written
more often than in the first step is not relied on again.
"""

from __future__ import annotations

from collections.abc import Sequence


class WriteCounts:
    """Counts the writes to the gradients of one chunk, in a window of micro-batches after which they are reduced."""

    def __init__(self, bucket_lengths: Sequence[int]) -> None:
        """bucket_lengths: the number of parameters in each bucket."""
        self._writes = [[0] * length for length in bucket_lengths]
        self._each: list[list[int]] | None = None
        """By bucket and parameter, writes a micro-batch; None until a window has ended."""
        self._num_missing = [0] * len(bucket_lengths)
        """By bucket, the parameters that are not whole."""
        self._num_microbatches = 0

    def begin(self, num_microbatches: int) -> None:
        """Begin a window."""
        self._num_microbatches = num_microbatches
        self._writes = [[0] * len(bucket) for bucket in self._writes]
        self._num_missing = [len(bucket) for bucket in self._writes]

    def note(self, bucket: int, index: int) -> None:
        """Count a write that is done."""
        self._writes[bucket][index] += 1
        if self._each is not None:
            is_last = self._writes[bucket][index] == self._each[bucket][index] * self._num_microbatches
            self._num_missing[bucket] -= is_last

    def is_whole(self, bucket: int) -> bool:
        """Say whether the first window tells that nothing more will be written to the bucket in this one.

        A parameter without a write in the first window, or with another number in each micro-batch, never is whole.
        """
        return self._each is not None and not self._num_missing[bucket]

    def end(self) -> None:
        """End the window: nothing more will be written. The first one is what later ones are compared with.

        What was written more often than that is never whole early again: each parameter can be misjudged once.
        """
        if self._each is None and self._num_microbatches:
            self._each = [[self._each_of(count) for count in bucket] for bucket in self._writes]
        elif self._each is not None:
            most = self._num_microbatches
            self._each = [
                [each if count <= each * most else 0 for each, count in zip(*one, strict=True)]
                for one in zip(self._each, self._writes, strict=True)
            ]

    def _each_of(self, count: int) -> int:
        each, rest = divmod(count, self._num_microbatches)
        return 0 if rest else each
