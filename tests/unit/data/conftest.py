"""Token files that the tests of megatrain.data write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatrain.data.indexed import token_dtype
from megatrain.data.indexed_writer import IndexedWriter


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes documents of token ids and returns the prefix of the files."""

    def write(documents: Sequence[Sequence[int]], name: str = "tokens", vocab_size: int = 4096) -> Path:
        prefix = tmp_path / name
        with IndexedWriter(prefix, token_dtype(vocab_size)) as writer:
            for document in documents:
                writer.add_document(np.array(document, dtype=np.int64))
        return prefix

    return write
