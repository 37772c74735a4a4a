"""Collectives of sequence parallelism in chunks, so that matrix multiplications overlap with them.

Each rank's rows are cut into K chunks. The gathered sequence is in chunk order: chunk 0 of all ranks, in group order,
then chunk 1 of all ranks, and so on. Gathered chunk k (chunk k of all ranks) is complete after the k-th all-gather and
needs no copy. Operations that work row by row accept any order. Operations that depend on the order first restore the
order of the sequence (the two functions at the end).

Chunks are exchanged one after another, in the order in which they were started: on CPUs in the group's lane (lanes.py),
on an accelerator on the group's stream. Without overlap, each chunk is awaited right after its start.
Shapes: S whole sequence, K chunks; a `_local` tensor holds S / tp_size rows, a gathered chunk S / K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatrain.comm.exchange import Pending
from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation


@dataclass(frozen=True, slots=True)
class SequenceChunks:
    """How a tensor-parallel group exchanges rows: each rank's rows in `num_chunks` chunks, overlapped with matrix
    multiplications or not."""

    group: Group
    num_chunks: int
    has_overlap: bool

    @property
    def num_runs(self) -> int:
        """The number of runs of rows that stay together when the order of rows changes."""
        return self.group.size * self.num_chunks

    def require_equal_chunks(self, num_local_rows: int) -> None:
        """Raise ValueError if a rank's rows cannot be cut into equal chunks."""
        if num_local_rows % self.num_chunks:
            raise ValueError(
                f"a rank's {num_local_rows} rows of the sequence cannot be cut into parallel.num_sequence_chunks="
                f"{self.num_chunks} equal chunks; use a divisor of seq_len / tp_size"
            )


class RowGathering:
    """Starts gathering the ranks' rows: [S / tp, ...] -> [S, ...] in chunk order.

    Communication: num_chunks all-gathers, in total (tp - 1) times the local rows' bytes received per rank.
    Raises: ValueError when the rows cannot be cut into equal chunks.
    """

    def __init__(self, x_local: Tensor, chunks: SequenceChunks) -> None:
        chunks.require_equal_chunks(x_local.shape[0])
        self.rows = x_local.new_empty((chunks.group.size * x_local.shape[0], *x_local.shape[1:]))
        """Complete once every gathered chunk has been awaited."""
        sent = x_local.contiguous().chunk(chunks.num_chunks)
        self._pending: list[Pending] = []
        for chunk_local, gathered in zip(sent, self.rows.chunk(chunks.num_chunks), strict=True):
            pending = chunks.group.all_gather(chunk_local, Operation.TP_ALL_GATHER, out=gathered)
            if not chunks.has_overlap:
                pending.wait()
            self._pending.append(pending)

    def gathered_chunks(self) -> Iterator[Tensor]:
        """Yield the gathered chunks in order, each once it has arrived. Shapes: each [S / K, ...]."""
        for pending in self._pending:
            yield pending.wait()

    def wait(self) -> Tensor:
        """Return all rows."""
        for pending in self._pending:
            pending.wait()
        return self.rows


class RowScattering:
    """Sums the ranks' gathered chunks and keeps this rank's rows: chunks [S / K, ...] in chunk order -> [S / tp, ...].

    Communication: a reduce-scatter per chunk, in total (tp - 1) / tp of all chunks' bytes sent per rank.
    """

    def __init__(self, chunks: SequenceChunks) -> None:
        self._chunks = chunks
        self._pending: list[Pending] = []
        self._out_local: Tensor | None = None

    def start(self, gathered: Tensor) -> None:
        """Start to reduce and scatter the next gathered chunk, which is contiguous and must not be used again."""
        chunks = self._chunks
        num_rows = gathered.shape[0] // chunks.group.size
        if self._out_local is None:
            self._out_local = gathered.new_empty((chunks.num_chunks * num_rows, *gathered.shape[1:]))
        first = len(self._pending) * num_rows
        out = self._out_local[first : first + num_rows]
        pending = chunks.group.reduce_scatter(gathered, Operation.TP_REDUCE_SCATTER, out=out)
        if not chunks.has_overlap:
            pending.wait()
        self._pending.append(pending)

    def wait(self) -> Tensor:
        """Return this rank's rows of the sum. The caller must have started all chunks."""
        assert self._out_local is not None
        for pending in self._pending:
            pending.wait()
        return self._out_local


def in_chunk_order(x: Tensor, chunks: SequenceChunks) -> Tensor:
    """Return a copy of the rows of the whole sequence in chunk order. Shapes: both [S, ...]."""
    return _reordered(x, chunks.group.size, chunks)


def in_sequence_order(x: Tensor, chunks: SequenceChunks) -> Tensor:
    """Return a copy of gathered rows in sequence order. Shapes: both [S, ...]."""
    return _reordered(x, chunks.num_chunks, chunks)


def _reordered(x: Tensor, num_outer: int, chunks: SequenceChunks) -> Tensor:
    num_inner = chunks.num_runs // num_outer
    return x.unflatten(0, (num_outer, num_inner, -1)).transpose(0, 1).flatten(0, 2)
