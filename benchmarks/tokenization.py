"""Tokens/s of `megatrain data build` with one and two workers, beside the tokenizers library's own batches.

Both sides have the same text, tokenizer and cores. The build reads JSON lines, tokenizes them and writes the tokens to
the disk; the library has the texts in memory and only encodes them, at its fastest settings (`tokenization_peer`).
Run alone on the machine: python -m benchmarks tokenization [--write] [--text-mb MB]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, at_least
from benchmarks.result import Result
from megatrain.data.corpus import open_corpus
from megatrain.data.inputs import PYTHON_STDLIB
from megatrain.data.tokenizer import train_tokenizer

ROUNDS = 5
WORKERS = (1, 2)
BAR = 0.9
VOCAB_SIZE = 32_000
PIECE_CHARACTERS = 4_000
TRAINING_PIECES = 1_500
OURS, PEER = "megatrain data build", "tokenizers"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One run of a side. `command_s`: seconds of the whole command; `settings`: what the side chose for itself."""

    num_tokens: int
    seconds: float
    command_s: float
    settings: str = ""


def run(text_mb: float, num_rounds: int = ROUNDS) -> Result:
    """Make the text and a tokenizer, then tokenize the text on as many cores as there are workers."""
    cores = sorted(os.sched_getaffinity(0))
    counts = [count for count in WORKERS if count <= len(cores)]
    with tempfile.TemporaryDirectory(prefix="tokenization-") as name:
        directory = Path(name)
        source, tokenizer = directory / "text.jsonl", directory / "tokenizer.json"
        pieces = _pieces()
        num_documents, text_bytes = _write_text(source, pieces, round(text_mb * 1e6))
        train_tokenizer(pieces[:: max(1, len(pieces) // TRAINING_PIECES)], VOCAB_SIZE).save(tokenizer)
        runs: dict[tuple[int, str], list[Tokenized]] = {}
        for count in counts:
            sides: dict[str, Callable[[], Tokenized]] = {
                OURS: partial(_build, source, tokenizer, directory / "out", cores[:count], num_documents),
                PEER: partial(_peer, source, tokenizer, cores[:count]),
            }
            for turn in range(num_rounds):
                for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                    runs.setdefault((count, side), []).append(sides[side]())
    (num_tokens,) = {one.num_tokens for some in runs.values() for one in some}  # both sides do the same work
    bars = _bars(counts, runs)
    return Result(
        name="tokenization",
        title=f"Tokenizing {text_bytes / 1e6:,.0f} MB of text, {num_tokens:,} tokens",
        command="python -m benchmarks tokenization --write",
        rows=[
            _row(count, side, runs, text_bytes, bar)
            for count, bar in zip(counts, bars, strict=True)
            for side in (OURS, PEER)
        ],
        notes=[
            f"medians of {num_rounds} runs a side, in turn; both sides may use as many cores as the build has workers",
            f"{OURS}: from the tokenizer's load to the last token on the disk",
            "two workers are threads of one process, in which a third thread reads the text",
            f"{PEER}: encoding alone, of texts in memory, with the method and the size of batches that win a trial",
            "ratio: tokens/s / those of the library on as many cores; tokens are those of the text, without ends",
            *(f"{count} workers: not measured on {len(cores)} core" for count in WORKERS if count not in counts),
        ],
        settings={"documents": num_documents, "vocab_size": VOCAB_SIZE},
        bars=bars,
    )


def _pieces() -> list[str]:
    """Return text that every machine has, Python's own library, in pieces as long as a page."""
    texts = (document.text for document in open_corpus([PYTHON_STDLIB]).documents())
    return [text[start : start + PIECE_CHARACTERS] for text in texts for start in range(0, len(text), PIECE_CHARACTERS)]


def _write_text(path: Path, pieces: Sequence[str], num_bytes: int) -> tuple[int, int]:
    """Write pieces of `num_bytes` in all, repeated if necessary. Return the number of documents and of bytes."""
    num_documents = written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            text = pieces[num_documents % len(pieces)]
            file.write(json.dumps({"text": text}) + "\n")
            num_documents += 1
            written += len(text.encode())
    return num_documents, written


def _build(source: Path, tokenizer: Path, output: Path, cores: Sequence[int], num_documents: int) -> Tokenized:
    """Run the command; its tokenizing lasts from the line on the tokenizer to the line on the tokenized documents."""
    command = [sys.executable, "-m", "megatrain", "data", "build", "--input", str(source), "--output", str(output),
               "--tokenizer", str(tokenizer), "--workers", str(len(cores)), "--json"]  # fmt: skip
    began = time.perf_counter()
    seen: dict[str, float] = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_limited_to(cores)
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stderr:
            seen[line.partition(":")[0]] = time.perf_counter()
        meta = json.loads(child.stdout.read())["meta"]
    command_s = time.perf_counter() - began
    shutil.rmtree(output)
    num_tokens = sum(meta[split]["tokens"] for split in ("train", "validation"))
    return Tokenized(num_tokens - num_documents, seen["tokenized"] - seen["tokenizer"], command_s)


def _peer(source: Path, tokenizer: Path, cores: Sequence[int]) -> Tokenized:
    environment = os.environ | {
        "RAYON_NUM_THREADS": str(len(cores)), "TOKENIZERS_PARALLELISM": "true" if len(cores) > 1 else "false",
    }  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tokenization_peer", str(source), str(tokenizer)],
        check=True, env=environment, stdout=subprocess.PIPE, preexec_fn=_limited_to(cores),
    )  # fmt: skip
    found = json.loads(done.stdout)
    return Tokenized(found["num_tokens"], found["seconds"], time.perf_counter() - began, found["settings"])


def _limited_to(cores: Sequence[int]) -> Callable[[], None]:
    """Return the function that a child calls first, so that it and its children use only these cores."""
    return partial(os.sched_setaffinity, 0, cores)


Runs = Mapping[tuple[int, str], Sequence[Tokenized]]
"""The runs of a number of workers and a side."""


def _rates(runs: Sequence[Tokenized]) -> list[float]:
    return [one.num_tokens / one.seconds for one in runs]


def _ratio(count: int, side: str, runs: Runs) -> float:
    return statistics.median(_rates(runs[count, side])) / statistics.median(_rates(runs[count, PEER]))


def _bars(counts: Sequence[int], runs: Runs) -> list[Bar]:
    return [at_least(f"{count} workers: tokens/s / the library's", _ratio(count, OURS, runs), BAR) for count in counts]


def _row(count: int, side: str, runs: Runs, text_bytes: int, bar: Bar) -> dict[str, Any]:
    own = runs[count, side]
    rates = _rates(own)
    judged = bar.row() if side == OURS else {"bar": "", "met": ""}
    return {
        "workers": count,
        "side": side,
        "settings": statistics.mode(one.settings for one in own),
        "tokens/s": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "MB/s": text_bytes / 1e6 / statistics.median(one.seconds for one in own),
        "command s": statistics.median(one.command_s for one in own),
        "ratio": _ratio(count, side, runs),
        "bar": judged["bar"],
        "met": judged["met"],
    }
