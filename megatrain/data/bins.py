"""The file `<prefix>.bins-<seq_len>`: the packed samples of a pair of token files, memory-mapped.

Little-endian: 8 bytes magic, uint64 version, uint64 seq_len, 32 bytes digest of the token files, uint64 number of
pieces, uint64 number of bins, uint32 CRC-32 of this header; then the pieces (packing.PIECE_DTYPE), int64 bounds: 0 and,
for each bin, the number of pieces up to its end; then int64 bounds of blocks: 0 and, for each block of documents, the
number of bins up to its end; then the sums of the blocks of all these bytes (block_sums.py).
packing.py determines the content; `megatrain data pack` writes the file.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.bad_tokens import BadTokens, BadTokensError
from megatrain.data.block_sums import BLOCK_BYTES, SUM_DTYPE, SummedContent, SummingWriter, num_blocks
from megatrain.data.dataset import data_digest
from megatrain.data.indexed import IndexedDataset
from megatrain.data.packing import BLOCK_DOCUMENTS, PIECE_DTYPE, PackedBlock, num_packed_blocks, pack_block
from megatrain.data.remote_path import AnyPath, DataPath, RemotePath, appended
from megatrain.data.sidecar import check_header, new_sidecar, packed_header
from megatrain.data.token_file import map_file
from megatrain.data.worker_pool import in_processes

BINS_MAGIC = b"MTBINS\x00\x00"
BINS_VERSION = 3
BINS_HEADER = struct.Struct("<8sQQ32sQQI")
_BOUND_BYTES = 8
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BinsSummary:
    """What packing made: bins of `seq_len` labels. `num_left_out`: documents of fewer than two tokens."""

    seq_len: int
    num_bins: int
    num_labels: int
    num_left_out: int

    @property
    def waste(self) -> float:
        """The part of all positions that is padding."""
        return 1.0 - self.num_labels / max(1, self.num_bins * self.seq_len)


def bins_path(prefix: AnyPath, seq_len: int) -> AnyPath:
    """Return the path of the packed samples of a pair."""
    return appended(prefix, f".bins-{seq_len}")


class PackedBins:
    """A memory-mapped file of packed samples, which belongs to `dataset`.

    Opening it reads the header only. `read` and `block_bounds` check what they read; the arrays
    `pieces`, `bounds` and `bounds_of_blocks` are the file as it is.
    Raises: DataError when the file is missing, damaged, of another version or of other token files, with the command
    that makes it; or when it holds no samples.
    """

    def __init__(self, dataset: IndexedDataset, seq_len: int) -> None:
        self.path = bins_path(dataset.prefix, seq_len)
        self.seq_len = seq_len
        self._again = again = f"make it again: `megatrain data pack {dataset.prefix} --seq-len {seq_len} --force`"
        if not self.path.exists():
            raise DataError(
                f"{self.path}: does not exist; make it with `megatrain data pack {dataset.prefix} --seq-len "
                f"{seq_len}`, or set data.packing=none"
            )
        content = map_file(self.path)
        if len(content) < BINS_HEADER.size:
            raise DataError(f"{self.path}: has {len(content)} bytes, less than its header; {again}")
        magic, version, found_len, digest, num_pieces, num_bins, _ = BINS_HEADER.unpack_from(content)
        if (magic, version, found_len) != (BINS_MAGIC, BINS_VERSION, seq_len):
            raise DataError(
                f"{self.path}: has magic {magic!r}, version {version} and seq_len {found_len}; expected "
                f"{BINS_MAGIC!r}, {BINS_VERSION} and {seq_len}; {again}"
            )
        check_header(self.path, content[: BINS_HEADER.size], digest, dataset, again)
        num_block_bounds = num_packed_blocks(dataset.num_documents) + 1
        num_bytes = num_pieces * PIECE_DTYPE.itemsize + (num_bins + 1 + num_block_bounds) * _BOUND_BYTES
        self._sums_start = BINS_HEADER.size + num_bytes
        size = self._sums_start + num_blocks(num_bytes) * SUM_DTYPE.itemsize
        if len(content) != size:
            raise DataError(
                f"{self.path}: has {len(content)} bytes, and its header describes {size}; it is cut off or damaged; "
                f"{again}"
            )
        if num_bins == 0:
            raise DataError(f"{self.path}: holds no samples, because no document has two tokens; use more text")
        self.pieces: NDArray[np.void] = np.frombuffer(content, PIECE_DTYPE, num_pieces, BINS_HEADER.size)
        self.bounds: NDArray[np.int64] = np.frombuffer(
            content, "<i8", num_bins + 1, BINS_HEADER.size + self.pieces.nbytes
        )
        blocks_start = BINS_HEADER.size + self.pieces.nbytes + self.bounds.nbytes
        self.bounds_of_blocks: NDArray[np.int64] = np.frombuffer(content, "<i8", num_block_bounds, blocks_start)
        self._summed = SummedContent(
            memoryview(content)[BINS_HEADER.size : self._sums_start],
            np.frombuffer(content, SUM_DTYPE, num_blocks(num_bytes), self._sums_start),
        )

    @property
    def num_bins(self) -> int:
        return len(self.bounds) - 1

    def read(self, bins: NDArray[np.int64]) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """Return the pieces of these bins, one bin after the other, and the bounds of the bins among these pieces.

        A few pages of the file are read for each bin. Shapes: bins [N], results [P] of PIECE_DTYPE and [N + 1].
        Raises: BadTokensError when a page differs from its checksum.
        """
        places = self.pieces.nbytes + bins * _BOUND_BYTES
        self._check(places, places + 2 * _BOUND_BYTES)
        firsts, ends = self.bounds[bins], self.bounds[bins + 1]
        self._check(firsts * PIECE_DTYPE.itemsize, ends * PIECE_DTYPE.itemsize)
        bounds = np.concatenate([[0], np.cumsum(ends - firsts)])
        # the indices of all pieces: those of bin n count up from firsts[n]
        places = np.arange(bounds[-1]) + np.repeat(firsts - bounds[:-1], ends - firsts)
        return self.pieces[places], bounds

    def block_bounds(self) -> NDArray[np.int64]:
        """Return 0 and, for each block of documents, the number of bins up to its end. Shape: [blocks + 1].

        Raises: BadTokensError when a page differs from its checksum.
        """
        start = self.pieces.nbytes + self.bounds.nbytes
        self._check(np.array([start]), np.array([start + self.bounds_of_blocks.nbytes]))
        return self.bounds_of_blocks

    def _check(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Check the blocks that overlap with these ranges of bytes after the header."""
        block = self._summed.first_damaged(starts, ends)
        if block is not None:
            reason = (
                f"the {BLOCK_BYTES} bytes from here on differ from their checksum; the file is damaged; {self._again}"
            )
            raise BadTokensError(BadTokens(str(self.path), BINS_HEADER.size + block * BLOCK_BYTES, None, reason))

    def first_wrong_sum(self) -> int | None:
        """Return the byte of the first checksum that differs from its block; None if all are right."""
        block = self._summed.first_damaged(np.zeros(1, np.int64), np.array([self._sums_start - BINS_HEADER.size]))
        return None if block is None else self._sums_start + block * SUM_DTYPE.itemsize


def write_bins(
    dataset: IndexedDataset,
    seq_len: int,
    *,
    num_workers: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> BinsSummary:
    """Pack the documents of `dataset` into `bins_path`. If the process is killed, an earlier file stays as it was.

    num_workers: processes that pack; their number does not change the file. `report` gets the number of documents that
    are packed so far, and the number of all documents. Raises: DataError when the token files are behind a URL or
    cannot be read, or the file cannot be written; MegatrainError when a process ends or cannot be started.
    """
    if isinstance(dataset.prefix, RemotePath):
        raise DataError(
            f"{dataset.prefix}: only local files can be packed; pack a local copy, and store the result beside these "
            "files"
        )
    path = bins_path(dataset.prefix, seq_len)
    num_bins = num_pieces = num_labels = num_left_out = 0
    with (
        new_sidecar(path) as file,
        TemporaryFile(dir=path.parent) as bounds,
        closing(_packed(dataset, seq_len, num_workers)) as blocks,
    ):
        file.write(bytes(BINS_HEADER.size))
        content, block_bounds = SummingWriter(file), [0]
        bounds.write(bytes(_BOUND_BYTES))
        for block, done in blocks:
            content.write(block.pieces.tobytes())
            bounds.write((block.bounds[1:] + num_pieces).astype("<i8").tobytes())
            num_bins += block.num_bins
            block_bounds.append(num_bins)
            num_pieces += len(block.pieces)
            num_labels += int(block.pieces["labels"].sum(dtype=np.int64))
            num_left_out += block.num_left_out
            report(done, dataset.num_documents)
        bounds.seek(0)
        while part := bounds.read(_COPY_BYTES):
            content.write(part)
        content.write(np.array(block_bounds, "<i8").tobytes())
        file.write(content.sums().tobytes())
        fields = (BINS_MAGIC, BINS_VERSION, seq_len, data_digest(dataset).encode("ascii"), num_pieces, num_bins)
        file.seek(0)
        file.write(packed_header(BINS_HEADER, *fields))
    return BinsSummary(seq_len, num_bins, num_labels, num_left_out)


def first_difference(dataset: IndexedDataset, bins: PackedBins) -> int | None:
    """Return a byte at which the file `bins` differs from the result of packing; None if it does not differ."""
    num_pieces, num_bins, block_bounds = 0, 0, [0]
    for block, _ in _packed(dataset, bins.seq_len, 1):
        pieces = bins.pieces[num_pieces : num_pieces + len(block.pieces)]
        wrong = np.flatnonzero(block.pieces[: len(pieces)] != pieces)
        if len(wrong) or len(pieces) < len(block.pieces):
            place = num_pieces + (int(wrong[0]) if len(wrong) else len(pieces))
            return BINS_HEADER.size + place * PIECE_DTYPE.itemsize
        bounds = bins.bounds[num_bins + 1 : num_bins + 1 + block.num_bins]
        wrong = np.flatnonzero(block.bounds[1 : len(bounds) + 1] + num_pieces != bounds)
        if len(wrong) or len(bounds) < block.num_bins:
            place = num_bins + 1 + (int(wrong[0]) if len(wrong) else len(bounds))
            return BINS_HEADER.size + bins.pieces.nbytes + place * _BOUND_BYTES
        num_pieces, num_bins = num_pieces + len(block.pieces), num_bins + block.num_bins
        block_bounds.append(num_bins)
    if bins.bounds[0] != 0:
        return BINS_HEADER.size + bins.pieces.nbytes
    if num_bins != bins.num_bins:
        return BINS_HEADER.size + bins.pieces.nbytes + (num_bins + 1) * _BOUND_BYTES
    wrong = np.flatnonzero(bins.bounds_of_blocks != block_bounds)
    if len(wrong):
        return BINS_HEADER.size + bins.pieces.nbytes + bins.bounds.nbytes + int(wrong[0]) * _BOUND_BYTES
    return bins.first_wrong_sum()


def _packed(dataset: IndexedDataset, seq_len: int, num_workers: int) -> Generator[tuple[PackedBlock, int]]:
    """Yield each packed block, with the number of documents up to its end."""
    firsts = range(0, dataset.num_documents, BLOCK_DOCUMENTS)
    results: Generator[tuple[int, PackedBlock]]
    if num_workers <= 1 or len(firsts) == 1:
        results = ((first, _pack(dataset, first, seq_len)) for first in firsts)
    else:
        results = in_processes(
            functools.partial(_pack_in_worker, dataset.prefix, seq_len),
            firsts,
            num_workers,
            task="packs",
            hint="run the command again, with fewer --workers if necessary",
        )
    with closing(results):
        for first, block in results:
            yield block, min(first + BLOCK_DOCUMENTS, dataset.num_documents)


def _pack(dataset: IndexedDataset, first: int, seq_len: int) -> PackedBlock:
    starts = dataset.document_starts(first, min(first + BLOCK_DOCUMENTS, dataset.num_documents) + 1)
    return pack_block(starts[:-1], np.diff(starts), seq_len)


@functools.cache
def _opened(prefix: DataPath) -> IndexedDataset:
    return IndexedDataset(prefix)


def _pack_in_worker(prefix: DataPath, seq_len: int, first: int) -> PackedBlock:
    return _pack(_opened(prefix), first, seq_len)
