"""What samples are read from: a stream of tokens, and the order in which the samples of a source take pieces of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from megatrain.data.cache_use import CacheUse
from megatrain.data.remote_file import RemoteBlock
from megatrain.data.stretches import LengthChange

Int64 = NDArray[np.int64]


class SamplePieces(NamedTuple):
    """The pieces of N samples: sample n has those from bounds[n] to bounds[n + 1].

    A piece has a first token and a number of labels; it spans one token more than labels. Shapes: starts and labels
    [P], bounds [N + 1].
    """

    starts: Int64
    labels: Int64
    bounds: Int64


class TokenStream(Protocol):
    """The documents of a source, end to end."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def cache_use(self) -> CacheUse | None:
        """What this process read through the cache of remote data; None: tokens are not in object storage."""

    def window(self, start: int, length: int) -> NDArray[Any]:
        """Return `length` tokens from position `start`. Raises: BadTokensError when they cannot be used."""

    def document_starts_between(self, first: int, last: int) -> Int64:
        """Return the positions p of documents' first tokens with first <= p < last, ascending."""

    def remote_blocks(self, start: int, length: int) -> Iterable[RemoteBlock]:
        """Return the blocks of remote files that hold these tokens."""


class SourceOrder(Protocol):
    """The order of the samples of a source."""

    @property
    def seed(self) -> int: ...

    def with_lengths(self, lengths: Sequence[LengthChange]) -> Self:
        """Return the order of the same tokens with samples of these lengths.

        Raises: DataError when the source cannot provide samples of one of the lengths.
        """

    def lengths(self, indices: Int64) -> Int64:
        """Return the number of positions of each sample. Shapes: all [N]."""

    def num_assembled(self, index: int) -> int:
        """Return how many samples of the length of sample `index` are assembled from windows of another length."""

    def epochs_after(self, num_samples: int) -> float:
        """Return how many passes over the stream the first `num_samples` samples make."""

    def pieces(self, cursors: Int64) -> SamplePieces:
        """Return the pieces of each sample. Raises: BadSampleError when they cannot be found."""
