"""Token files: Megatron's .bin/.idx pair. indexed_writer.py writes them.

.bin has the token ids of all sequences, back to back. .idx is little-endian: 9 bytes magic, uint64 version 1, uint8
code of the id type, uint64 number of sequences, uint64 number of document bounds, then the int32 length of each
sequence, the int64 byte offset of each sequence in the .bin, and int64 bounds: 0 and, for each document, the number of
sequences up to its end.
Source: the format of Megatron-Core 0.16 (datasets/indexed_dataset.py); the code is new. Not supported: a mode per
sequence (multimodal data).
"""

from __future__ import annotations

import bisect
import mmap
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.bad_tokens import BadTokens, BadTokensError
from megatrain.data.cache_use import CacheUse
from megatrain.data.remote_file import RemoteBlock, RemoteFile
from megatrain.data.remote_path import AnyPath, DataPath, RemotePath, appended
from megatrain.data.token_file import TokenFile, UnreadableError, map_version, unopened

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_UINT16_VOCAB_LIMIT = 65500  # Megatron's limit, so that both programs choose the same type
_CHECK_BLOCK = 1 << 16  # sequences checked at a time: what is computed for them stays in the caches of a core
_READ_TOKENS = 1 << 22
_LARGEST_FILE_BYTES = 1 << 62  # more than any file system allows; one block beyond this still fits in int64


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the id type that Megatron would choose for a vocabulary."""
    return INDEX_DTYPES[8] if vocab_size < _UINT16_VOCAB_LIMIT else INDEX_DTYPES[4]


def data_path(prefix: AnyPath) -> AnyPath:
    """Return the path of the tokens."""
    return appended(prefix, ".bin")


def index_path(prefix: AnyPath) -> AnyPath:
    """Return the path of the index."""
    return appended(prefix, ".idx")


class IndexedDataset:
    """A .bin/.idx pair: one stream of tokens with the bounds of its documents.

    The index is mapped. Nothing is read ahead here: local data are in the page cache, which all ranks of a host share,
    and `remote_blocks` names what to fetch. With `vocab_size`, the ids of every window are checked when it is read.
    checked_version: the `version` of files that were checked before; such files are not checked again.
    Raises: DataError when the files cannot be read, are damaged, or do not belong to each other.
    """

    def __init__(self, prefix: DataPath, vocab_size: int | None = None, checked_version: str = "") -> None:
        self.prefix = prefix
        self.vocab_size = vocab_size
        index, index_version = map_version(index_path(prefix))
        self.dtype, num_sequences, num_bounds = _read_header(index_path(prefix), index)
        offset = INDEX_HEADER.size
        self.sequence_lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", num_sequences, offset)
        offset += self.sequence_lengths.nbytes
        self.sequence_pointers: NDArray[np.int64] = np.frombuffer(index, "<i8", num_sequences, offset)
        offset += self.sequence_pointers.nbytes
        self.document_bounds: NDArray[np.int64] = np.frombuffer(index, "<i8", num_bounds, offset)
        # the arrays of the index are not aligned, so numpy would copy a whole array to search it
        self._search_pointers = memoryview(index)[offset - self.sequence_pointers.nbytes : offset].cast("q")
        self._search_bounds = memoryview(index)[offset:].cast("q")
        path = data_path(prefix)
        try:
            self._data = path.file() if isinstance(path, RemotePath) else TokenFile(path)
        except FileNotFoundError as error:
            raise unopened(path, error) from error
        self.version = f"{index_version}; {self._data.version}"
        """What distinguishes the two files, as they were opened, from others of the same name."""
        if self.version != checked_version:
            _check_sums(self, self._data.num_bytes)

    @property
    def num_tokens(self) -> int:
        return self._data.num_bytes // self.dtype.itemsize

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_bounds) - 1

    def document_start(self, document: int) -> int:
        """Return the position of a document's first token in the stream; for `num_documents` the end of the stream."""
        sequence = int(self.document_bounds[document])
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.sequence_pointers[sequence]) // self.dtype.itemsize

    def document_starts(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions of the first tokens of documents `first` to `last` - 1.

        Document number `num_documents` is the end of the stream. Only this part of the index is copied.
        """
        sequences = self.document_bounds[first:last]
        if not len(sequences):
            return np.zeros(0, np.int64)
        low, high = int(sequences[0]), int(sequences[-1])
        # the end of the stream has no pointer; it is the last entry if `high` is the number of sequences
        pointers = np.append(self.sequence_pointers[low : high + 1] // self.dtype.itemsize, self.num_tokens)
        starts: NDArray[np.int64] = pointers[sequences - low]
        return starts

    def document(self, document: int) -> NDArray[Any]:
        """Return a document's tokens. Raises: BadTokensError when they cannot be read."""
        start = self.document_start(document)
        return self.read_tokens(start, self.document_start(document + 1) - start)

    def document_starts_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions p of documents' first tokens with first <= p < last, ascending.

        Binary searches on the mapped index avoid a copy of the index, which would take 800 MB per rank for 10^8
        documents.
        """
        item, bounds = self.dtype.itemsize, self._search_bounds
        first_sequence = bisect.bisect_left(self._search_pointers, first * item)
        end_sequence = bisect.bisect_left(self._search_pointers, last * item, lo=first_sequence)
        first_document = bisect.bisect_left(bounds, first_sequence)
        end_document = bisect.bisect_left(bounds, end_sequence, lo=first_document)
        sequences = self.document_bounds[first_document:end_document] - first_sequence
        return self.sequence_pointers[first_sequence:end_sequence].copy()[sequences] // item

    def document_of(self, position: int) -> int:
        """Return the number of the document that the token at `position` is in."""
        sequence = bisect.bisect_right(self._search_pointers, position * self.dtype.itemsize) - 1
        return bisect.bisect_right(self._search_bounds, sequence) - 1

    def read_tokens(self, start: int, length: int) -> NDArray[Any]:
        """Return `length` tokens from position `start`, or all up to the end; of the file's type, unchecked.

        Raises: BadTokensError when they cannot be read.
        """
        item = self.dtype.itemsize
        length = max(0, min(length, self.num_tokens - start))
        try:
            return np.frombuffer(self._data.read(start * item, length * item), self.dtype)
        except UnreadableError as error:
            raise self._bad_tokens(error.offset, error.reason) from error

    def tokens_at(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return the tokens at these positions, which ascend. Shapes: both [N].

        A range of the file with several positions is read at once. Raises: BadTokensError when it cannot be read.
        """
        found = np.empty(len(positions), self.dtype)
        done = 0
        while done < len(positions):
            start = int(positions[done])
            end = int(np.searchsorted(positions, start + _READ_TOKENS))
            found[done:end] = self.read_tokens(start, int(positions[end - 1]) - start + 1)[positions[done:end] - start]
            done = end
        return found

    def remote_blocks(self, start: int, length: int) -> Iterable[RemoteBlock]:
        """Return the blocks that `window` reads from object storage; none for a local file."""
        if isinstance(self._data, TokenFile):
            return ()
        item = self.dtype.itemsize
        return self._data.blocks(start * item, max(0, min(length, self.num_tokens - start)) * item)

    @property
    def cache_use(self) -> CacheUse | None:
        """What this process read of the pair through the cache of remote data; None: a pair of local files."""
        return self._data.cache_use if isinstance(self._data, RemoteFile) else None

    def window(self, start: int, length: int) -> NDArray[Any]:
        """Return `length` tokens from position `start`, or all up to the end; of the file's type.

        Raises: BadTokensError when they cannot be read, or an id is outside the vocabulary.
        """
        tokens = self.read_tokens(start, length)
        self.check_vocabulary(tokens, start)
        return tokens

    def check_vocabulary(self, tokens: NDArray[Any], start: int) -> None:
        """Check the ids of tokens that were read from position `start` on. Without `vocab_size`, all are accepted.

        Raises: BadTokensError when an id is outside the vocabulary.
        """
        vocab_size = self.vocab_size
        if vocab_size is None or not len(tokens):
            return
        largest = int(tokens.max())
        smallest = int(tokens.min()) if tokens.dtype.kind == "i" else 0
        if largest >= vocab_size or smallest < 0:
            wrong = largest if smallest >= 0 else smallest
            position = start + int((tokens == wrong).argmax())
            raise self._bad_tokens(
                position * self.dtype.itemsize,
                f"token id {wrong} at position {position} is outside model.vocab_size={vocab_size}; set "
                "model.vocab_size to the tokenizer's, or build the data again",
            )

    def _bad_tokens(self, offset: int, reason: str) -> BadTokensError:
        document = self.document_of(offset // self.dtype.itemsize)
        return BadTokensError(BadTokens(str(data_path(self.prefix)), offset, document, reason))


def _read_header(path: DataPath, index: bytes | mmap.mmap) -> tuple[np.dtype[Any], int, int]:
    if len(index) < INDEX_HEADER.size:
        raise _truncated(path, "an index header", INDEX_HEADER.size, len(index))
    magic, version, code, num_sequences, num_bounds = INDEX_HEADER.unpack_from(index)
    if magic != INDEX_MAGIC:
        raise DataError(
            f"{path}: starts with {magic!r}, but an index starts with {INDEX_MAGIC!r}; this is another kind of file"
        )
    if version != INDEX_VERSION:
        raise DataError(
            f"{path}: is version {version} of the index format, but only version {INDEX_VERSION} is supported"
        )
    if code not in INDEX_DTYPES:
        known = ", ".join(f"{code} ({dtype.name})" for code, dtype in INDEX_DTYPES.items())
        raise DataError(f"{path}: has tokens of type code {code}; the supported integer types are {known}")
    expected = INDEX_HEADER.size + 12 * num_sequences + 8 * num_bounds
    if num_sequences and len(index) == expected + num_sequences:
        raise DataError(
            f"{path}: has a mode for each sequence, from byte {expected} on, as in multimodal data; only text is "
            "supported: write the index without modes"
        )
    if len(index) != expected:
        raise _truncated(path, f"an index of {num_sequences} sequences and {num_bounds} bounds", expected, len(index))
    if num_sequences == 0 or num_bounds < 2:
        raise DataError(f"{path}: holds no documents; build the data again from text")
    return INDEX_DTYPES[code], num_sequences, num_bounds


def _check_sums(dataset: IndexedDataset, num_data_bytes: int) -> None:
    """Check that the sequences lie back to back and fill the .bin exactly, and that the documents cover all of them."""
    path = index_path(dataset.prefix)
    position, item = 0, dataset.dtype.itemsize
    # one array for all blocks: each new one would be memory that the kernel zeroes page by page
    sums = np.empty(min(_CHECK_BLOCK, dataset.num_sequences) + 1, np.int64)
    for first in range(0, dataset.num_sequences, _CHECK_BLOCK):
        lengths = dataset.sequence_lengths[first : first + _CHECK_BLOCK]
        pointers = dataset.sequence_pointers[first : first + _CHECK_BLOCK]
        expected = sums[: len(lengths) + 1]
        expected[0] = position
        np.multiply(lengths, item, out=expected[1:], dtype=np.int64)
        np.cumsum(expected, out=expected)
        if lengths.min() < 0 or not np.array_equal(pointers, expected[:-1]):
            at = int(np.argmax((pointers != expected[:-1]) | (lengths < 0)))
            raise DataError(
                f"{path}: sequence {first + at} of {int(lengths[at]) * item} bytes lies at byte {int(pointers[at])}, "
                f"but the lengths before it add up to {int(expected[at])}; the index is damaged, build the data again"
            )
        position = int(expected[-1])
        if position > _LARGEST_FILE_BYTES:
            break
    if position != num_data_bytes:
        raise _truncated(data_path(dataset.prefix), f"the tokens that {path} lists", position, num_data_bytes)
    if num_data_bytes == 0:
        raise DataError(f"{data_path(dataset.prefix)}: holds no tokens; build the data again from text")
    bounds = dataset.document_bounds
    if bounds[0] != 0 or bounds[-1] != dataset.num_sequences or np.any(bounds[1:] < bounds[:-1]):
        raise DataError(
            f"{path}: document bounds run from {int(bounds[0])} to {int(bounds[-1])}, but must rise from 0 to "
            f"the {dataset.num_sequences} sequences; the index is damaged, build the data again"
        )


def _truncated(path: DataPath, what: str, expected: int, found: int) -> DataError:
    return DataError(
        f"{path}: {what} takes {expected} bytes, found {found}; the file is cut off or damaged, or .bin and .idx "
        "belong to different data: copy or build them again"
    )
