"""The file `<prefix>.costs`: the cost of each document of a pair of token files, memory-mapped.

Little-endian: 8 bytes magic, uint64 version, 32 bytes digest of the token files, uint64 number of documents, uint32
CRC-32 of the sums at the end, uint32 CRC-32 of this header; then a uint32 cost for each document, in any unit; then the
sums of the blocks of costs (block_sums.py). `megatrain data costs` writes the file.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.block_sums import SUM_DTYPE, SummedContent, SummingWriter, num_blocks
from megatrain.data.dataset import data_digest
from megatrain.data.indexed import IndexedDataset
from megatrain.data.remote_path import AnyPath, RemotePath, appended
from megatrain.data.sidecar import check_header, new_sidecar, packed_header
from megatrain.data.token_file import map_file

COSTS_MAGIC = b"MTCOSTS\x00"
COSTS_VERSION = 1
COSTS_HEADER = struct.Struct("<8sQ32sQII")
COST_DTYPE = np.dtype("<u4")
LARGEST_COST = (1 << 32) - 1
_LINES = 1 << 16


@dataclass(frozen=True, slots=True)
class CostsSummary:
    """The costs that were written: their number, their sum, and the largest."""

    num_documents: int
    total: int
    largest: int


def costs_path(prefix: AnyPath) -> AnyPath:
    """Return the path of the costs of a pair."""
    return appended(prefix, ".costs")


class DocumentCosts:
    """The costs of the documents of `dataset`. Opening reads the header and the checksums; `read` checks what it reads.

    `digest`: a digest of the content.
    Raises: DataError when the file is missing, damaged, or of other token files, with the command that makes it.
    """

    def __init__(self, dataset: IndexedDataset) -> None:
        self.dataset = dataset
        self.path = costs_path(dataset.prefix)
        command = f"megatrain data costs {dataset.prefix} --input FILE"
        self._again = again = f"make it again: `{command} --force`"
        if not self.path.exists():
            raise DataError(f"{self.path}: does not exist; make it with `{command}`, or set data.balance=cost")
        content = map_file(self.path)
        if len(content) < COSTS_HEADER.size:
            raise DataError(f"{self.path}: has {len(content)} bytes, less than its header; {again}")
        magic, version, digest, num_documents, sum_of_sums, header_sum = COSTS_HEADER.unpack_from(content)
        if (magic, version) != (COSTS_MAGIC, COSTS_VERSION):
            raise DataError(
                f"{self.path}: has magic {magic!r} and version {version}; expected {COSTS_MAGIC!r} and "
                f"{COSTS_VERSION}; {again}"
            )
        check_header(self.path, content[: COSTS_HEADER.size], digest, dataset, again)
        num_bytes = num_documents * COST_DTYPE.itemsize
        size = COSTS_HEADER.size + num_bytes + num_blocks(num_bytes) * SUM_DTYPE.itemsize
        if num_documents != dataset.num_documents or len(content) != size:
            raise DataError(
                f"{self.path}: has {len(content)} bytes and costs of {num_documents} documents; expected {size} bytes "
                f"and the costs of the {dataset.num_documents} documents of {dataset.prefix}; {again}"
            )
        sums = content[COSTS_HEADER.size + num_bytes :]
        if zlib.crc32(sums) != sum_of_sums:
            raise DataError(
                f"{self.path}: its checksums, from byte {COSTS_HEADER.size + num_bytes} on, are damaged; {again}"
            )
        # the header has a sum of all checksums
        self.digest = f"{header_sum:08x}"
        self._costs: NDArray[np.uint32] = np.frombuffer(content, COST_DTYPE, num_documents, COSTS_HEADER.size)
        self._summed = SummedContent(
            memoryview(content)[COSTS_HEADER.size : COSTS_HEADER.size + num_bytes], np.frombuffer(sums, SUM_DTYPE)
        )

    def read(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the costs of documents `first` to `end` - 1, at least one. Raises: DataError when they are damaged."""
        item = COST_DTYPE.itemsize
        block = self._summed.first_damaged(np.array([first * item]), np.array([end * item]))
        if block is not None:
            raise DataError(
                f"{self.path}: the costs from document {first} on differ from their checksum; {self._again}"
            )
        return self._costs[first:end].astype(np.int64)


def write_costs(dataset: IndexedDataset, lines: Iterable[str], shown: str) -> CostsSummary:
    """Write the costs of all documents to `costs_path`. If the process is killed, an earlier file stays as it was.

    lines: one cost each. shown: the name of the lines' source, for errors.
    Raises: DataError when a line is not a cost, there are more or fewer lines than documents, the token files are
    behind a URL, or writing fails.
    """
    if isinstance(dataset.prefix, RemotePath):
        raise DataError(
            f"{dataset.prefix}: costs are written only for local files; write them for a local copy, and store the "
            "result beside these files"
        )
    coming, num_documents, total, largest = iter(lines), 0, 0, 0
    with new_sidecar(costs_path(dataset.prefix)) as file:
        file.write(bytes(COSTS_HEADER.size))
        content = SummingWriter(file)
        while part := list(itertools.islice(coming, _LINES)):
            costs = [_cost(line, shown, num_documents + number) for number, line in enumerate(part, 1)]
            content.write(np.array(costs, COST_DTYPE).tobytes())
            num_documents, total, largest = num_documents + len(costs), total + sum(costs), max(largest, *costs)
        if num_documents != dataset.num_documents:
            raise DataError(
                f"{shown}: has {num_documents} costs, and {dataset.prefix} has {dataset.num_documents} documents; give "
                "one cost a line for each document, in the order of the file"
            )
        sums = content.sums().tobytes()
        file.write(sums)
        fields = (COSTS_MAGIC, COSTS_VERSION, data_digest(dataset).encode("ascii"), num_documents, zlib.crc32(sums))
        file.seek(0)
        file.write(packed_header(COSTS_HEADER, *fields))
    return CostsSummary(num_documents, total, largest)


def _cost(line: str, shown: str, number: int) -> int:
    text = line.strip()
    cost = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST_COST)) else -1
    if not 0 <= cost <= LARGEST_COST:
        raise DataError(
            f"{shown}, line {number}: {text[:40]!r} is not an integer from 0 to {LARGEST_COST}; choose another unit"
        )
    return cost
