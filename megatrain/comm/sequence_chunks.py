"""Exchanges of sequence parallelism in chunks, so that matrix products overlap with them.

Each rank's rows are cut in K chunks. The gathered sequence is in chunk order: chunk 0 of all ranks, in group order,
then chunk 1 of all ranks, and so on; piece k of it arrives whole with the k-th exchange and needs no copy. What works
row by row does not mind the order; what does, puts rows in the sequence's own (the two functions at the end).

Chunks travel one after another, in the order in which they were started: on CPUs the group has a lane (queue.py), on an
accelerator the library's own stream. Without overlap each is awaited at once.
Shapes: S whole sequence, K chunks; a `_local` tensor holds S / tp_size rows, a piece S / K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatrain.comm.group import Group, Pending
from megatrain.contracts.operations import Operation


@dataclass(frozen=True, slots=True)
class SequenceChunks:
    """How a tensor-parallel group exchanges rows: in `num_chunks` chunks of each rank's, overlapped with matrix
    products or not."""

    group: Group
    num_chunks: int
    has_overlap: bool

    @property
    def num_pieces(self) -> int:
        """Runs of rows that stay together when their order changes."""
        return self.group.size * self.num_chunks

    def require_whole(self, num_local_rows: int) -> None:
        """Raise ValueError where a rank's rows cannot be cut in equal chunks."""
        if num_local_rows % self.num_chunks:
            raise ValueError(
                f"a rank's {num_local_rows} rows of the sequence cannot be cut in parallel.num_sequence_chunks="
                f"{self.num_chunks} equal chunks; use a divisor of seq_len / tp_size"
            )


class RowGathering:
    """Starts joining the ranks' rows: [S / tp, ...] -> [S, ...] in chunk order.

    Communication: num_chunks all-gathers, together (tp - 1) times the local rows' bytes received per rank.
    Raises: ValueError when the rows cannot be cut.
    """

    def __init__(self, x_local: Tensor, chunks: SequenceChunks) -> None:
        chunks.require_whole(x_local.shape[0])
        self.rows = x_local.new_empty((chunks.group.size * x_local.shape[0], *x_local.shape[1:]))
        """Whole when all was awaited."""
        sent = x_local.contiguous().chunk(chunks.num_chunks)
        self._pending: list[Pending] = []
        for chunk_local, piece in zip(sent, self.rows.chunk(chunks.num_chunks), strict=True):
            pending = chunks.group.all_gather(chunk_local, Operation.TP_ALL_GATHER, out=piece)
            if not chunks.has_overlap:
                pending.wait()
            self._pending.append(pending)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the pieces in order, each when it has arrived. Shapes: each [S / K, ...]."""
        for pending in self._pending:
            yield pending.wait()

    def wait(self) -> Tensor:
        """Return all rows."""
        for pending in self._pending:
            pending.wait()
        return self.rows


class RowScattering:
    """Sums the ranks' pieces and keeps own rows: pieces [S / K, ...] in chunk order -> [S / tp, ...].

    Communication: a reduce-scatter for each piece, together (tp - 1) / tp of all pieces' bytes sent per rank.
    """

    def __init__(self, chunks: SequenceChunks) -> None:
        self._chunks = chunks
        self._pending: list[Pending] = []
        self._out_local: Tensor | None = None

    def start(self, piece: Tensor) -> None:
        """Start the exchange of the next piece, which is contiguous and belongs to it from here on."""
        chunks = self._chunks
        num_rows = piece.shape[0] // chunks.group.size
        if self._out_local is None:
            self._out_local = piece.new_empty((chunks.num_chunks * num_rows, *piece.shape[1:]))
        first = len(self._pending) * num_rows
        out = self._out_local[first : first + num_rows]
        pending = chunks.group.reduce_scatter(piece, Operation.TP_REDUCE_SCATTER, out=out)
        if not chunks.has_overlap:
            pending.wait()
        self._pending.append(pending)

    def wait(self) -> Tensor:
        """Return own rows of the sum, when all pieces were started."""
        assert self._out_local is not None
        for pending in self._pending:
            pending.wait()
        return self._out_local


def in_chunk_order(x: Tensor, chunks: SequenceChunks) -> Tensor:
    """Return a copy of rows of the whole sequence in the order in which they are gathered. Shapes: both [S, ...]."""
    return _reordered(x, chunks.group.size, chunks)


def in_sequence_order(x: Tensor, chunks: SequenceChunks) -> Tensor:
    """Return a copy of gathered rows in the order of the sequence. Shapes: both [S, ...]."""
    return _reordered(x, chunks.num_chunks, chunks)


def _reordered(x: Tensor, num_outer: int, chunks: SequenceChunks) -> Tensor:
    num_inner = chunks.num_pieces // num_outer
    return x.unflatten(0, (num_outer, num_inner, -1)).transpose(0, 1).flatten(0, 2)
