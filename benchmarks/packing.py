"""Padding of packed samples, documents that are cut, and the time to pack, for documents of several kinds.

The documents are this Python's own library, and as many as four blocks hold, with lengths of a log-normal distribution.
Without packing, the token stream is cut every seq_len tokens: nothing is padded, but documents are cut.
Run alone on the machine: python -m benchmarks packing [--write]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bars import Bar, at_most
from benchmarks.result import Result
from megatrain.data.build import build
from megatrain.data.indexed import IndexedDataset
from megatrain.data.inputs import PYTHON_STDLIB
from megatrain.data.packing import BLOCK_DOCUMENTS, pack_block

ROUNDS = 3
SEQ_LENS = (2048, 8192, 32_768)
BARRED_SEQ_LEN = 8192
BAR = 0.02
NUM_DRAWN = 4 * BLOCK_DOCUMENTS
Lengths = NDArray[np.int64]


def run() -> Result:
    """Pack the documents for each seq_len, several times."""
    corpora = {"Python's library": library_lengths(), "log-normal": drawn_lengths()}
    rows, bars = list[dict[str, Any]](), list[Bar]()
    for name, lengths in corpora.items():
        for seq_len in SEQ_LENS:
            row = _row(name, lengths, seq_len)
            rows.append(row)
            if seq_len == BARRED_SEQ_LEN:
                bars.append(at_most(f"{name}, samples of {seq_len:,}: padding", row["padding"], BAR))
    return Result(
        name="packing",
        title="Packing documents into samples",
        command="python -m benchmarks packing --write",
        rows=rows,
        notes=[
            "padding: the part of all positions that hold no token",
            "cut: the part of the documents that no sample holds whole; without packing, windows are the samples",
            f"seconds: CPU seconds of one process for a million documents, median of {ROUNDS} runs",
            f"log-normal: {NUM_DRAWN:,} lengths, median e^6, sigma 1.3, seed 0",
        ],
        settings={
            name: f"{len(lengths):,} documents, {int(lengths.sum()):,} tokens" for name, lengths in corpora.items()
        },
        bars=bars,
    )


def library_lengths() -> Lengths:
    """Return the lengths of the documents of this Python's own library, in tokens of a tokenizer trained on them."""
    with tempfile.TemporaryDirectory(prefix="packing-") as directory:
        build([PYTHON_STDLIB], Path(directory) / "data")
        dataset = IndexedDataset(Path(directory) / "data" / "train")
        return np.diff(dataset.document_starts(0, dataset.num_documents + 1))


def drawn_lengths() -> Lengths:
    """Return lengths of a log-normal distribution."""
    return np.maximum(1, np.random.default_rng(0).lognormal(6.0, 1.3, NUM_DRAWN)).astype(np.int64)


def _row(name: str, lengths: Lengths, seq_len: int) -> dict[str, Any]:
    starts = np.cumsum(lengths) - lengths
    blocks = [slice(first, first + BLOCK_DOCUMENTS) for first in range(0, len(lengths), BLOCK_DOCUMENTS)]
    seconds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        packed = [pack_block(starts[block], lengths[block], seq_len) for block in blocks]
        seconds.append(time.process_time() - began)
    num_bins = sum(block.num_bins for block in packed)
    num_labels = sum(int(block.pieces["labels"].sum(dtype=np.int64)) for block in packed)
    ends = starts + np.maximum(lengths - 2, 0)
    return {
        "documents": name,
        "seq_len": seq_len,
        "samples": num_bins,
        "padding": 1 - num_labels / (num_bins * seq_len),
        "cut": float((lengths - 1 > seq_len).mean()),
        "cut without packing": float((starts // seq_len != ends // seq_len).mean()),
        "seconds": statistics.median(seconds) / len(lengths) * 1e6,
    }
