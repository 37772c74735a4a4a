"""The tokens of all documents in the order of the corpus, on disk, and the progress of a build.

`tokens` has the ids back to back, `documents` one record of DOCUMENT_DTYPE for each document. `progress.json` has the
number of valid bytes or records of both files, and the record of the corpus where the next block begins. It is replaced
only after these bytes are on disk. A resumed build truncates both files to these sizes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.closable import Closable
from megatrain.contracts.files.whole_files import write_private
from megatrain.data.blocks import DocumentBlock
from megatrain.data.corpus import START, CorpusPosition
from megatrain.data.tokenizing import DOCUMENT_DTYPE, TokenizedBlock

_TOKENS, _DOCUMENTS, _PROGRESS = "tokens", "documents", "progress.json"
_BLOCKS_BETWEEN_SAVES = 32
"""After a kill, at most this many blocks, of about a megabyte of text each, are tokenized again."""


@dataclass(frozen=True, slots=True)
class SpoolProgress:
    """What a spool holds. `place`: where the next block begins in the corpus. `file_bytes`: about how many bytes of the
    corpus's files have been read for it."""

    token_bytes: int = 0
    documents: int = 0
    place: CorpusPosition = START
    skipped: Mapping[str, int] = field(default_factory=dict)
    file_bytes: int = 0
    is_complete: bool = False


class TokenSpool(Closable):
    """The spool in `directory`, which continues that of a killed build."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.progress = _read_progress(directory)
        self._num_unsaved = 0
        self._tokens = _opened_at(directory / _TOKENS, self.progress.token_bytes)
        self._documents = _opened_at(directory / _DOCUMENTS, self.progress.documents * DOCUMENT_DTYPE.itemsize)

    def close(self) -> None:
        self._tokens.close()
        self._documents.close()

    def add(self, block: DocumentBlock, tokenized: TokenizedBlock) -> None:
        """Append the next block."""
        self._tokens.write(tokenized.tokens)
        self._documents.write(tokenized.documents)
        self.progress = SpoolProgress(
            self.progress.token_bytes + len(tokenized.tokens),
            self.progress.documents + tokenized.num_documents,
            block.end,
            block.skipped,
            block.file_bytes,
        )
        self._num_unsaved += 1
        if self._num_unsaved == _BLOCKS_BETWEEN_SAVES:
            self._save()

    def finish(self, skipped: Counter[str]) -> None:
        """Record that the corpus has no further block; `skipped` counts all records that were left out."""
        old = self.progress
        self.progress = SpoolProgress(
            old.token_bytes, old.documents, old.place, dict(skipped), old.file_bytes, is_complete=True
        )
        self._save()

    def documents(self) -> NDArray[Any]:
        """Return the records of all documents, of DOCUMENT_DTYPE."""
        return np.fromfile(self._directory / _DOCUMENTS, DOCUMENT_DTYPE, self.progress.documents)

    def tokens(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return all tokens, mapped from the disk."""
        if self.progress.token_bytes == 0:
            return np.zeros(0, dtype)
        return np.memmap(self._directory / _TOKENS, dtype, mode="r").view(np.ndarray)

    def _save(self) -> None:
        for file in (self._tokens, self._documents):
            file.flush()
            os.fsync(file.fileno())
        write_private(self._directory / _PROGRESS, json.dumps(asdict(self.progress)).encode())
        self._num_unsaved = 0


def _read_progress(directory: Path) -> SpoolProgress:
    """Return the progress of a killed build, or that of a new build if there is none or its files are damaged."""
    try:
        values = json.loads((directory / _PROGRESS).read_bytes())
        progress = SpoolProgress(**{**values, "place": CorpusPosition(**values["place"])})
        sizes = [(directory / name).stat().st_size for name in (_TOKENS, _DOCUMENTS)]
    except (OSError, ValueError, KeyError, TypeError):
        return SpoolProgress()
    is_whole = sizes[0] >= progress.token_bytes and sizes[1] >= progress.documents * DOCUMENT_DTYPE.itemsize
    return progress if is_whole else SpoolProgress()


def _opened_at(path: Path, num_bytes: int) -> IO[bytes]:
    """Truncate a file to its first `num_bytes` bytes and open it to append."""
    path.touch()
    file = path.open("r+b")
    file.truncate(num_bytes)
    file.seek(num_bytes)
    return file
