"""The file `<prefix>.bins-<seq_len>`: the packed samples of a pair of token files, memory-mapped.

Little-endian: 8 bytes magic, uint64 version, uint64 seq_len, 32 bytes digest of the token files, uint64 number of
pieces, uint64 number of bins; then the pieces (packing.PIECE_DTYPE), and int64 bounds: 0 and, for each bin, the number
of pieces up to its end. packing.py determines the content; `megatrain data pack` writes the file.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.contracts.files.whole_files import sync_directory, temporary_name
from megatrain.data.dataset import data_digest
from megatrain.data.indexed import IndexedDataset, map_file
from megatrain.data.packing import BLOCK_DOCUMENTS, PIECE_DTYPE, PackedBlock, pack_block
from megatrain.data.worker_pool import in_processes

BINS_MAGIC = b"MTBINS\x00\x00"
BINS_VERSION = 1
BINS_HEADER = struct.Struct("<8sQQ32sQQ")


@dataclass(frozen=True, slots=True)
class BinsSummary:
    """What packing made: bins of `seq_len` labels. `num_left_out`: documents of fewer than two tokens."""

    seq_len: int
    num_bins: int
    num_pieces: int
    num_labels: int
    num_left_out: int

    @property
    def waste(self) -> float:
        """The part of all positions that is padding."""
        return 1.0 - self.num_labels / max(1, self.num_bins * self.seq_len)


def bins_path(prefix: Path, seq_len: int) -> Path:
    """Return the path of the packed samples of a pair."""
    return Path(f"{prefix}.bins-{seq_len}")


class PackedBins:
    """A memory-mapped file of packed samples, which belongs to `dataset`.

    Raises: DataError when the file is missing, damaged, or of other token files; the message says how to make it.
    """

    def __init__(self, dataset: IndexedDataset, seq_len: int) -> None:
        self.path = bins_path(dataset.prefix, seq_len)
        self.seq_len = seq_len
        again = f"`megatrain data pack {dataset.prefix} --seq-len {seq_len} --force`"
        if not self.path.exists():
            raise DataError(
                f"{self.path}: does not exist; make it with `megatrain data pack {dataset.prefix} --seq-len "
                f"{seq_len}`, or set data.packing=none"
            )
        content = map_file(self.path)
        if len(content) < BINS_HEADER.size:
            raise DataError(f"{self.path}: has {len(content)} bytes, less than its header; make it again: {again}")
        magic, version, found_len, digest, num_pieces, num_bins = BINS_HEADER.unpack_from(content)
        if (magic, version, found_len) != (BINS_MAGIC, BINS_VERSION, seq_len):
            raise DataError(
                f"{self.path}: has magic {magic!r}, version {version} and seq_len {found_len}; expected "
                f"{BINS_MAGIC!r}, {BINS_VERSION} and {seq_len}; make it again: {again}"
            )
        wanted = data_digest(dataset)
        if digest.decode("ascii", "replace") != wanted:
            raise DataError(
                f"{self.path}: was made for data with digest {digest.decode('ascii', 'replace')}, and {dataset.prefix} "
                f"has {wanted}; make it again: {again}"
            )
        size = BINS_HEADER.size + num_pieces * PIECE_DTYPE.itemsize + (num_bins + 1) * 8
        if len(content) != size:
            raise DataError(
                f"{self.path}: has {len(content)} bytes, and its header describes {size}; it is cut off or damaged, "
                f"make it again: {again}"
            )
        if num_bins == 0:
            raise DataError(f"{self.path}: holds no samples, because no document has two tokens; use more text")
        self.pieces: NDArray[np.void] = np.frombuffer(content, PIECE_DTYPE, num_pieces, BINS_HEADER.size)
        self.bounds: NDArray[np.int64] = np.frombuffer(
            content, "<i8", num_bins + 1, BINS_HEADER.size + self.pieces.nbytes
        )

    @property
    def num_bins(self) -> int:
        return len(self.bounds) - 1


def write_bins(
    dataset: IndexedDataset,
    seq_len: int,
    *,
    num_workers: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> BinsSummary:
    """Pack the documents of `dataset` into `bins_path`. After a kill, the file from before remains, or none.

    num_workers: processes that pack; it does not change the file. `report` gets the documents that are packed so far
    and their number. Raises: DataError when the file cannot be written; MegatrainError when a process ends.
    """
    path = bins_path(dataset.prefix, seq_len)
    temporary = path.with_name(temporary_name(path.name))
    bounds, num_pieces, num_labels, num_left_out = [np.zeros(1, np.int64)], 0, 0, 0
    try:
        with temporary.open("wb") as file, closing(_packed(dataset, seq_len, num_workers)) as blocks:
            file.write(bytes(BINS_HEADER.size))
            for block, done in blocks:
                file.write(block.pieces.tobytes())
                bounds.append(block.bounds[1:] + num_pieces)
                num_pieces += len(block.pieces)
                num_labels += int(block.pieces["labels"].sum(dtype=np.int64))
                num_left_out += block.num_left_out
                report(done, dataset.num_documents)
            num_bins = sum(map(len, bounds)) - 1
            for part in bounds:
                file.write(part.astype("<i8").tobytes())
            file.seek(0)
            digest = data_digest(dataset).encode("ascii")
            file.write(BINS_HEADER.pack(BINS_MAGIC, BINS_VERSION, seq_len, digest, num_pieces, num_bins))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror or error}; free space or change its access"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return BinsSummary(seq_len, num_bins, num_pieces, num_labels, num_left_out)


def first_difference(dataset: IndexedDataset, bins: PackedBins) -> int | None:
    """Return the byte of the first place at which a file differs from what packing makes; None if there is none."""
    num_pieces, num_bins = 0, 0
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
            return BINS_HEADER.size + bins.pieces.nbytes + place * 8
        num_pieces, num_bins = num_pieces + len(block.pieces), num_bins + block.num_bins
    if bins.bounds[0] != 0:
        return BINS_HEADER.size + bins.pieces.nbytes
    return None if num_bins == bins.num_bins else BINS_HEADER.size + bins.pieces.nbytes + (num_bins + 1) * 8


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
def _opened(prefix: Path) -> IndexedDataset:
    """Return the token files, which a worker opens once."""
    return IndexedDataset(prefix)


def _pack_in_worker(prefix: Path, seq_len: int, first: int) -> PackedBlock:
    return _pack(_opened(prefix), first, seq_len)
