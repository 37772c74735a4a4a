"""Token files: Megatron's .bin/.idx pair, written and memory-mapped.

.bin has the token ids of all sequences, back to back. .idx is little-endian: 9 bytes magic, uint64 version 1, uint8
code of the id type, uint64 number of sequences, uint64 number of document bounds, then the int32 length of each
sequence, the int64 byte offset of each sequence in the .bin, and int64 bounds: 0 and, for each document, the number of
sequences up to its end.
Source: the format is that of Megatron-Core 0.16 (datasets/indexed_dataset.py), the code is ours. Left out: a mode per
sequence (multimodal data).
"""

from __future__ import annotations

import bisect
import hashlib
import mmap
import os
import struct
from array import array
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_UINT16_VOCAB_LIMIT = 65500  # Megatron's own limit, so that both choose the same type
_LONGEST_SEQUENCE = 2**31 - 1
_COPY_BLOCK = 1 << 22  # tokens
_CHECK_BLOCK = 1 << 20  # sequences checked at a time: 20 MB
_LARGEST_FILE_BYTES = 1 << 62  # larger than any file system allows; sums up to this and one more block fit in int64


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the id type that Megatron would choose for a vocabulary."""
    return _DTYPES[8] if vocab_size < _UINT16_VOCAB_LIMIT else _DTYPES[4]


def data_path(prefix: Path) -> Path:
    """Return the path of the tokens."""
    return Path(f"{prefix}.bin")


def index_path(prefix: Path) -> Path:
    """Return the path of the index."""
    return Path(f"{prefix}.idx")


class IndexedWriter:
    """Writes one document after another under temporary names; `close` gives both complete files their names.

    As a context manager it closes on success and removes everything on an error.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = dtype
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self._digest = hashlib.sha256()
        self.bin_sha256 = self.idx_sha256 = ""
        """The SHA-256 of both files, after `close`."""
        self._data_part = Path(f"{data_path(prefix)}.part-{os.getpid()}")
        self._index_part = Path(f"{index_path(prefix)}.part-{os.getpid()}")
        self._largest = int(np.iinfo(dtype).max)
        self._file: IO[bytes] = self._data_part.open("wb")

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def add_document(self, tokens: NDArray[Any]) -> None:
        """Append one document of one sequence.

        Raises: DataError when it is longer than the format allows, or an id does not fit the id type.
        """
        if len(tokens) > _LONGEST_SEQUENCE:
            raise DataError(
                f"{data_path(self._prefix)}: document {len(self._bounds) - 1} has {len(tokens)} tokens, the format "
                f"allows {_LONGEST_SEQUENCE}; cut it"
            )
        self._write(tokens, f"document {len(self._bounds) - 1}")
        self._lengths.append(len(tokens))
        self._bounds.append(len(self._lengths))

    def add_all(self, dataset: IndexedDataset) -> None:
        """Append all documents of another pair, with the sequences of each.

        Raises: DataError when an id does not fit the id type.
        """
        first = len(self._lengths)
        for start in range(0, dataset.num_tokens, _COPY_BLOCK):
            tokens = dataset.tokens[start : start + _COPY_BLOCK]
            self._write(tokens, f"{data_path(dataset.prefix)} from position {start}")
        self._lengths.frombytes(dataset.sequence_lengths.astype(np.intc).tobytes())
        self._bounds.frombytes((dataset.document_bounds[1:] + first).astype(np.int64).tobytes())

    def _write(self, tokens: NDArray[Any], name: str) -> None:
        if len(tokens) and (int(tokens.max()) > self._largest or int(tokens.min()) < 0):
            raise DataError(
                f"{data_path(self._prefix)}: {name} has token ids {int(tokens.min())} to "
                f"{int(tokens.max())}, {self._dtype.name} holds 0 to {self._largest}; state the true vocabulary size"
            )
        content = tokens.astype(self._dtype, copy=False).tobytes()
        self._digest.update(content)
        self._file.write(content)

    def close(self) -> None:
        """Write the index and give both files their names, the index last."""
        try:
            _sync_and_close(self._file)
            with self._index_part.open("wb") as file:
                index_digest = self._write_index(file)
                _sync_and_close(file)
            self._data_part.replace(data_path(self._prefix))
            self._index_part.replace(index_path(self._prefix))
            self.bin_sha256, self.idx_sha256 = self._digest.hexdigest(), index_digest
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove the temporary files."""
        self._file.close()
        self._data_part.unlink(missing_ok=True)
        self._index_part.unlink(missing_ok=True)

    def _write_index(self, file: IO[bytes]) -> str:
        """Write the index and return its SHA-256."""
        lengths = np.frombuffer(self._lengths, dtype=np.intc).astype("<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
        digest = hashlib.sha256()
        for content in (
            _HEADER.pack(_MAGIC, _VERSION, _CODES[self._dtype], len(lengths), len(self._bounds)),
            lengths.tobytes(),
            (ends - lengths.astype("<i8") * self._dtype.itemsize).tobytes(),
            np.frombuffer(self._bounds, dtype=np.int64).astype("<i8").tobytes(),
        ):
            digest.update(content)
            file.write(content)
        return digest.hexdigest()


class IndexedDataset:
    """A memory-mapped .bin/.idx pair: one stream of tokens with the bounds of its documents.

    Nothing is read ahead: the memory is the page cache, which all ranks of a host share. With `vocab_size`, every
    window is checked against it when it is read.
    """

    def __init__(self, prefix: Path, vocab_size: int | None = None) -> None:
        self.prefix = prefix
        self.vocab_size = vocab_size
        index = _map(index_path(prefix))
        self.dtype, num_sequences, num_bounds = _read_header(index_path(prefix), index)
        offset = _HEADER.size
        self.sequence_lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", num_sequences, offset)
        offset += self.sequence_lengths.nbytes
        self.sequence_pointers: NDArray[np.int64] = np.frombuffer(index, "<i8", num_sequences, offset)
        offset += self.sequence_pointers.nbytes
        self.document_bounds: NDArray[np.int64] = np.frombuffer(index, "<i8", num_bounds, offset)
        data = _map(data_path(prefix))
        _check_sums(self, len(data))
        self.tokens: NDArray[Any] = np.frombuffer(data, self.dtype)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

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

    def document(self, document: int) -> NDArray[Any]:
        """Return a document's tokens."""
        return self.tokens[self.document_start(document) : self.document_start(document + 1)]

    def document_starts_between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions p of documents' first tokens with first <= p < last, in order.

        Two binary searches on the mapped index avoid a copy of it, which would take 800 MB per rank for 10^8 documents.
        """
        documents = range(self.num_documents)
        low = bisect.bisect_left(documents, first, key=self.document_start)
        high = bisect.bisect_left(documents, last, lo=low, key=self.document_start)
        return np.array([self.document_start(document) for document in range(low, high)], dtype=np.int64)

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """Return `length` tokens from position `start`.

        Raises: DataError when an id is outside the vocabulary.
        """
        tokens = self.tokens[start : start + length].astype(np.int64)
        if self.vocab_size is not None and len(tokens):
            self._check_vocabulary(tokens, start, self.vocab_size)
        return tokens

    def _check_vocabulary(self, tokens: NDArray[np.int64], start: int, vocab_size: int) -> None:
        largest, smallest = int(tokens.max()), int(tokens.min())
        if largest >= vocab_size or smallest < 0:
            wrong = largest if smallest >= 0 else smallest
            position = start + int((tokens == wrong).argmax())
            raise DataError(
                f"{data_path(self.prefix)}: token id {wrong} at position {position} is outside "
                f"model.vocab_size={vocab_size}; set model.vocab_size to the tokenizer's, or build the data again"
            )


def _sync_and_close(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _map(path: Path) -> bytes | mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; give the prefix of a .bin/.idx pair, "
            "such as `megatrain data build` makes"
        ) from error


def _read_header(path: Path, index: bytes | mmap.mmap) -> tuple[np.dtype[Any], int, int]:
    if len(index) < _HEADER.size:
        raise _truncated(path, "an index header", _HEADER.size, len(index))
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack_from(index)
    if magic != _MAGIC:
        raise DataError(f"{path}: starts with {magic!r}, an index starts with {_MAGIC!r}; this is another kind of file")
    if version != _VERSION:
        raise DataError(f"{path}: is version {version} of the index format, only version {_VERSION} is supported")
    if code not in _DTYPES:
        known = ", ".join(f"{code} ({dtype.name})" for code, dtype in _DTYPES.items())
        raise DataError(f"{path}: has tokens of type code {code}; the supported integer types are {known}")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if num_sequences and len(index) == expected + num_sequences:
        raise DataError(
            f"{path}: has a mode for each sequence, from byte {expected} on, as multimodal data; only text is "
            "supported: write the index without modes"
        )
    if len(index) != expected:
        raise _truncated(path, f"an index of {num_sequences} sequences and {num_bounds} bounds", expected, len(index))
    if num_sequences == 0 or num_bounds < 2:
        raise DataError(f"{path}: holds no documents; build the data again from text")
    return _DTYPES[code], num_sequences, num_bounds


def _check_sums(dataset: IndexedDataset, num_data_bytes: int) -> None:
    """Check that the sequences lie back to back and fill the .bin exactly, and that the documents cover all of them."""
    path = index_path(dataset.prefix)
    position = 0
    for first in range(0, dataset.num_sequences, _CHECK_BLOCK):
        lengths = dataset.sequence_lengths[first : first + _CHECK_BLOCK].astype(np.int64) * dataset.dtype.itemsize
        pointers = dataset.sequence_pointers[first : first + _CHECK_BLOCK]
        expected = position + np.concatenate(([0], np.cumsum(lengths)))
        wrong = np.flatnonzero((pointers != expected[:-1]) | (lengths < 0))
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"{path}: sequence {first + at} of {int(lengths[at])} bytes lies at byte {int(pointers[at])}, "
                f"the lengths before it add up to {int(expected[at])}; the index is damaged, build the data again"
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
            f"{path}: document bounds run from {int(bounds[0])} to {int(bounds[-1])}, must rise from 0 to the "
            f"{dataset.num_sequences} sequences; the index is damaged, build the data again"
        )


def _truncated(path: Path, what: str, expected: int, found: int) -> DataError:
    return DataError(
        f"{path}: {what} takes {expected} bytes, found {found}; the file is cut off or damaged, or .bin and .idx are "
        "not of the same data: copy or build them again"
    )
