"""Writes token files: Megatron's .bin/.idx pair, whose format indexed.py describes."""

from __future__ import annotations

import hashlib
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.indexed import (
    INDEX_DTYPES,
    INDEX_HEADER,
    INDEX_MAGIC,
    INDEX_VERSION,
    IndexedDataset,
    data_path,
    index_path,
)

_CODES = {dtype: code for code, dtype in INDEX_DTYPES.items()}
_LONGEST_SEQUENCE = 2**31 - 1
_COPY_BLOCK = 1 << 22  # tokens


class IndexedWriter:
    """Writes one document after another to files with temporary names; `close` completes and renames both.

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
                f"{data_path(self._prefix)}: document {len(self._bounds) - 1} has {len(tokens)} tokens, and the format "
                f"allows {_LONGEST_SEQUENCE}; cut it"
            )
        self._write(tokens, f"document {len(self._bounds) - 1}")
        self._lengths.append(len(tokens))
        self._bounds.append(len(self._lengths))

    def add_all(self, dataset: IndexedDataset) -> None:
        """Append all documents of another pair, with the sequences of each.

        Raises: DataError when an id does not fit the id type, or tokens cannot be read.
        """
        first = len(self._lengths)
        for start in range(0, dataset.num_tokens, _COPY_BLOCK):
            tokens = dataset.read_tokens(start, _COPY_BLOCK)
            self._write(tokens, f"{data_path(dataset.prefix)} from position {start}")
        self._lengths.frombytes(dataset.sequence_lengths.astype(np.intc).tobytes())
        self._bounds.frombytes((dataset.document_bounds[1:] + first).astype(np.int64).tobytes())

    def _write(self, tokens: NDArray[Any], name: str) -> None:
        if len(tokens) and (int(tokens.max()) > self._largest or int(tokens.min()) < 0):
            raise DataError(
                f"{data_path(self._prefix)}: {name} has token ids {int(tokens.min())} to "
                f"{int(tokens.max())}, and {self._dtype.name} holds 0 to {self._largest}; state the true vocabulary "
                "size"
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
            INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, _CODES[self._dtype], len(lengths), len(self._bounds)),
            lengths.tobytes(),
            (ends - lengths.astype("<i8") * self._dtype.itemsize).tobytes(),
            np.frombuffer(self._bounds, dtype=np.int64).astype("<i8").tobytes(),
        ):
            digest.update(content)
            file.write(content)
        return digest.hexdigest()


def _sync_and_close(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
