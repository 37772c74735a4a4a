"""Divide documents into bins of seq_len labels, so that each sample holds whole documents where they fit: best fit.

A document of n tokens has n - 1 labels. Documents are packed in blocks of 65,536, in the order of the file, so that
blocks can be packed in parallel and memory stays bounded. A document with more labels than a bin holds is cut: each of
its pieces except the last fills a bin. The last pieces and the shorter documents are packed by decreasing length, each
into the fullest bin that has room for it. The result depends on the lengths and seq_len only.
Pure functions: no I/O and no clock.
Source: best fit decreasing, Johnson et al. 1974; for documents Ding et al., Fewer Truncations (ICML 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_DOCUMENTS = 65_536
ALGORITHM = "best_fit"
"""The name that checkpoints record. Another algorithm needs another name, because it changes the samples."""
PIECE_DTYPE = np.dtype([("start", "<i8"), ("labels", "<i4")])
"""A stretch of one document: the position of its first token in the stream, and its number of labels."""


def num_packed_blocks(num_documents: int) -> int:
    """Return the number of blocks that documents are packed in."""
    return -(-num_documents // BLOCK_DOCUMENTS)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlock:
    """The bins of a block: bin b has the pieces from bounds[b] to bounds[b + 1].

    Shapes: pieces [P] of PIECE_DTYPE, bounds [num_bins + 1]. `num_left_out`: documents of fewer than two tokens, which
    have no label.
    """

    pieces: NDArray[np.void]
    bounds: NDArray[np.int64]
    num_left_out: int

    @property
    def num_bins(self) -> int:
        return len(self.bounds) - 1


def pack_block(starts: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int) -> PackedBlock:
    """Pack the documents of a block. Within a bin, pieces are in the order of the file.

    starts, lengths: the first token and the number of tokens of each document. Shapes: [documents].
    """
    labels = np.maximum(lengths - 1, 0)
    num_full, rests = np.divmod(labels, seq_len)
    # the pieces that fill a bin, in the order of the file
    owners = np.repeat(np.arange(len(labels)), num_full)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
    full = np.zeros(len(owners), PIECE_DTYPE)
    full["start"] = starts[owners] + numbers * seq_len
    full["labels"] = seq_len
    last = np.flatnonzero(rests)
    rest = np.zeros(len(last), PIECE_DTYPE)
    rest["start"] = starts[last] + num_full[last] * seq_len
    rest["labels"] = rests[last]
    bins = best_fit(rests[last], seq_len)
    in_order = np.argsort(bins, kind="stable")
    counts = np.concatenate([np.ones(len(full), np.int64), np.bincount(bins) if len(bins) else np.zeros(0, np.int64)])
    return PackedBlock(
        pieces=np.concatenate([full, rest[in_order]]),
        bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        num_left_out=int(np.count_nonzero(labels == 0)),
    )


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the bin of each item: by decreasing length, each into the fullest bin that has room. Shapes: [items].

    Items of one length are taken in their order. Each length is at least 1 and at most `capacity`.
    """
    bins = np.empty(len(lengths), np.int64)
    # bit r of `rooms` is set if a bin with room r exists; open_bins[r] are these bins
    rooms, num_bins = 0, 0
    open_bins: dict[int, list[int]] = {}
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            same_room = open_bins[room]
            chosen = same_room.pop()
            if not same_room:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, num_bins
            num_bins += 1
        bins[item] = chosen
        left = room - length
        if left:
            open_bins.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return bins
