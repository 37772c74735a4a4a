"""Samples/s that one process reads from a .bin/.idx pair, beside Megatron-Core's GPTDataset of the same files.

Both sides read random samples of SEQ_LEN tokens as int64 tokens and labels, with and without their means against
attention across document boundaries. Each side is a separate process, which reads on request; the sides take turns, in
the opposite order in every second round. The files are in the page cache.
Run alone on the machine: python -m benchmarks data_reading [--write] [--million-tokens N]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bars import Bar, at_least
from benchmarks.data_reading_sides import OURS, PEER, SEQ_LEN, VOCAB_SIZE, Reading, ReadingCase, reading_process
from benchmarks.result import Result
from megatrain.data.indexed import token_dtype
from megatrain.data.indexed_writer import IndexedWriter

ROUNDS = 7
ROUND_SAMPLES = 960
BAR = 2.0
SEED = 1
CASES = {
    OURS: [ReadingCase(has_documents, batch) for has_documents in (False, True) for batch in (1, 4)],
    PEER: [ReadingCase(has_documents, 1) for has_documents in (False, True)],
}


def run(million_tokens: float, num_rounds: int = ROUNDS, round_samples: int = ROUND_SAMPLES) -> Result:
    """Write tokens, then read samples of them on both sides."""
    with tempfile.TemporaryDirectory(prefix="data-reading-") as name, ExitStack() as processes:
        prefix = Path(name) / "tokens"
        num_documents = _write_tokens(prefix, round(million_tokens * 1e6))
        sides = {side: processes.enter_context(reading_process(side, prefix)) for side in CASES}
        readings: dict[tuple[str, ReadingCase], list[Reading]] = {}
        for turn in range(num_rounds):
            for side in list(CASES)[:: 1 if turn % 2 == 0 else -1]:
                for case in CASES[side]:
                    reading = sides[side](case, turn * round_samples, round_samples)
                    readings.setdefault((side, case), []).append(reading)
    return Result(
        name="data-reading",
        title=f"Random samples of {SEQ_LEN:,} tokens, read by one process",
        command="python -m benchmarks data_reading --write",
        rows=[_row(side, case, readings) for side, cases in CASES.items() for case in cases],
        notes=[
            f"medians of {num_rounds} rounds a side, in turn, of {round_samples} samples each",
            f"{OURS}: a step's micro-batches [S, B]; every token id is checked against the vocabulary",
            f"{OURS}, documents: the number of each token's document, no loss for the last token of a document",
            f"{PEER}: samples [S] with loss mask and position ids; without batches, which cost another copy",
            f"{PEER}, documents: reset_position_ids, reset_attention_mask, eod_mask_loss; no mask of S x S is made",
            "cpu us: CPU time of a sample, all threads; ratio: samples/s / those of the peer in the same case",
        ],
        settings={"tokens": round(million_tokens * 1e6), "documents": num_documents, "vocab_size": VOCAB_SIZE},
        bars=_bars(readings),
    )


def _write_tokens(prefix: Path, num_tokens: int) -> int:
    """Write documents as long as web pages, each with token 0 at its end. Return their number."""
    random = np.random.default_rng(SEED)
    num_documents = written = 0
    with IndexedWriter(prefix, token_dtype(VOCAB_SIZE)) as writer:
        while written < num_tokens:
            length = min(max(2, int(random.lognormal(6.0, 1.2))), num_tokens - written)
            tokens = random.integers(1, VOCAB_SIZE, length)
            tokens[-1] = 0
            writer.add_document(tokens)
            num_documents += 1
            written += length
    return num_documents


Readings = Mapping[tuple[str, ReadingCase], Sequence[Reading]]


def _rates(some: Sequence[Reading]) -> list[float]:
    return [one.num_samples / one.seconds for one in some]


def _ratio(side: str, case: ReadingCase, readings: Readings) -> float:
    peer = readings[PEER, ReadingCase(case.has_documents, 1)]
    return statistics.median(_rates(readings[side, case])) / statistics.median(_rates(peer))


def _bars(readings: Readings) -> list[Bar]:
    return [
        at_least(f"{case.text()}: samples/s / those of {PEER}", _ratio(OURS, case, readings), BAR)
        for case in CASES[OURS]
    ]


def _row(side: str, case: ReadingCase, readings: Readings) -> dict[str, Any]:
    some = readings[side, case]
    rates = _rates(some)
    return {
        "side": side,
        "documents": "yes" if case.has_documents else "no",
        "batch": case.micro_batch_size,
        "samples/s": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "cpu us": statistics.median(one.cpu_s / one.num_samples * 1e6 for one in some),
        "Mtokens/s": statistics.median(rates) * SEQ_LEN / 1e6,
        "ratio": _ratio(side, case, readings),
    }
