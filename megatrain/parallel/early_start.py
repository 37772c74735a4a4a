"""Decides when the gradients of a bucket are whole, by counting writes.

Backward writes to a parameter's gradient once per micro-batch; several times where sequence chunks, or both ends
of a tied model, add to it; later where a schedule defers wgrads. So the first step counts the writes. From then on a
bucket is whole when each of its parameters has as many writes as in the first step. Buckets start in their own order,
even if a later one is whole first. So all ranks start them in the same order, even if they counted differently. A
bucket with a parameter that was once written more often than in the first step never starts early again.
"""

from __future__ import annotations

from collections.abc import Sequence


class WriteCounts:
    """Counts the writes to one chunk's gradients in a window: the micro-batches before one reduction."""

    def __init__(self, bucket_lengths: Sequence[int]) -> None:
        """bucket_lengths: the number of parameters in each bucket."""
        self._writes = [[0] * length for length in bucket_lengths]
        self._each: list[list[int]] | None = None
        """By bucket and parameter, the writes per micro-batch; None until the first window has ended."""
        self._num_missing = [0] * len(bucket_lengths)
        """By bucket, the number of parameters whose gradients are not whole."""
        self._num_microbatches = 0

    def begin(self, num_microbatches: int) -> None:
        """Begin a window."""
        self._num_microbatches = num_microbatches
        self._writes = [[0] * len(bucket) for bucket in self._writes]
        self._num_missing = [len(bucket) for bucket in self._writes]

    def note(self, bucket: int, index: int) -> None:
        """Count one finished write."""
        self._writes[bucket][index] += 1
        if self._each is not None:
            is_last = self._writes[bucket][index] == self._each[bucket][index] * self._num_microbatches
            self._num_missing[bucket] -= is_last

    def is_whole(self, bucket: int) -> bool:
        """Return whether, judging by the first window, nothing more will be written to the bucket in this window.

        A parameter without a write in the first window, or whose writes were not a multiple of the number of
        micro-batches, is never whole.
        """
        return self._each is not None and not self._num_missing[bucket]

    def end(self) -> None:
        """End the window: nothing more will be written. Later windows are compared with the first one.

        A parameter that was written more often than in the first window is never whole early again, so each parameter
        can be misjudged only once.
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
