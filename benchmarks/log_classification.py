"""The speed of log classification on one core: MB/s of log text that is fed in chunks of 64 KiB, by kind of text.

Run alone on the machine: python -m benchmarks log_classification [--write]
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.bars import at_least
from benchmarks.result import Result
from megatrain_job.failures.classifier import LogClassifier

CHUNK_BYTES = 1 << 16
TEXT_BYTES = 16_000_000
REPEATS = 5
BAR_MB_S = 20.0
SEED = 7
EXAMPLES_VARIABLE = "MEGATRAIN_FAILURE_LOGS"

_FAILURES = (
    "[rank{0}]:[E] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1})",
    "[rank{0}]: RuntimeError: [gloo/transport/tcp/pair.cc:{1}] Connection closed by peer [10.1.{2}.{0}]:{1}",
    "[rank{0}]:   File \"/opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py\", line {1}, in _call_impl",
    "node{0}:{1}:{2} [{0}] NCCL WARN socketProgress: Connection closed by remote peer node{2}<{1}>",
    "[rank{0}]: KeyError: 'layer.{1}.weight'",
    "/opt/env/torch/x.py:{1}: UserWarning: step {2} is an error-prone use",
    "W0302 torch/distributed/elastic/multiprocessing/api.py:{1}] Sending process {2} closing signal SIGTERM",
)  # fmt: skip


def metrics(rng: random.Random) -> str:
    return (
        f" [2026-11-20 10:{rng.randrange(60):02d}:{rng.randrange(60):02d}.{rng.randrange(1000):03d}] iteration "
        f"{rng.randrange(500000):8d}/  500000 | consumed samples: {rng.randrange(10**9):12d} | elapsed time per "
        f"iteration (ms): {rng.uniform(4000, 4500):.1f} | learning rate: {rng.uniform(1e-5, 9e-5):.3E} | "
        "global batch size:  1024 | "
        f"lm loss: {rng.uniform(1, 3):.6E} | loss scale: 1.0 | grad norm: {rng.random():.3f} | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def start_up(rng: random.Random) -> str:
    ranks = rng.randrange(64), rng.randrange(64)
    return (
        f"node{rng.randrange(99)}:{rng.randrange(99999)}:{rng.randrange(99999)} [{ranks[0] % 8}] NCCL INFO Channel "
        f"{rng.randrange(32):02d}/0 : {ranks[0]}[{ranks[0] % 8}] -> {ranks[1]}[{ranks[1] % 8}] via P2P/CUMEM"
    )


def failure(rng: random.Random) -> str:
    return rng.choice(_FAILURES).format(rng.randrange(64), rng.randrange(99999), rng.randrange(999))


def prose(rng: random.Random) -> str:
    """Return a line unlike any other: 12 of 20,000 meaningless words."""
    words = (_word(rng.randrange(20_000)) for _ in range(12))
    return f"[rank{rng.randrange(8)}]: sample: {' '.join(words)}"


def _word(number: int) -> str:
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    letters: list[str] = []
    while number or len(letters) < 3:
        number, digit = divmod(number, len(consonants) * len(vowels))
        letters.append(consonants[digit % len(consonants)] + vowels[digit // len(consonants)])
    return "".join(letters)


def texts() -> dict[str, bytes]:
    """Return the texts by name."""
    rng = random.Random(SEED)

    def lines(*makers: tuple[float, object]) -> bytes:
        weights = [weight for weight, _ in makers]
        sample = [rng.choices(makers, weights)[0][1](rng) for _ in range(20_000)]  # type: ignore[operator]
        block = "\n".join(sample).encode() + b"\n"
        return block * (TEXT_BYTES // len(block) + 1)

    found = {
        "a run: metrics, start-up, 0.2 % failures": lines((0.7, metrics), (0.298, start_up), (0.002, failure)),
        "metrics only": lines((1.0, metrics)),
        "nothing but failures": lines((1.0, failure)),
        "no line like another": b"\n".join(prose(rng).encode() for _ in range(60_000)),
    }
    examples = Path(os.environ.get(EXAMPLES_VARIABLE, "../shared/data/failure_logs/examples.jsonl"))
    if examples.is_file():
        logs = "\n".join(json.loads(line)["log"] for line in examples.read_text().splitlines())
        changed = (re.sub(r"\d", lambda _: str(rng.randrange(10)), logs) for _ in range(100))
        found["labeled examples, digits changed"] = "\n".join(changed).encode()
    return found


def rate_mb_s(text: bytes) -> float:
    """Return the MB/s of one pass with a new classifier."""
    classifier = LogClassifier()
    started = time.perf_counter()
    for start in range(0, len(text), CHUNK_BYTES):
        classifier.feed(text[start : start + CHUNK_BYTES])
    classifier.finish()
    return len(text) / 1e6 / (time.perf_counter() - started)


def run() -> Result:
    """Measure each kind of text."""
    rows: list[dict[str, Any]] = []
    for name, text in texts().items():
        rates = [rate_mb_s(text) for _ in range(REPEATS)]
        rows.append(
            {"text": name, "MB": len(text) / 1e6, "median MB/s": statistics.median(rates), "least MB/s": min(rates)}
        )
    return Result(
        name="log-classification",
        title="How fast logs are classified",
        command="python -m benchmarks log_classification --write",
        rows=rows,
        notes=[
            f"one thread, chunks of {CHUNK_BYTES // 1024} KiB, a new classifier a pass, median of {REPEATS} passes",
            "`no line like another` is the worst case: each line has a shape that was never seen",
        ],
        bars=[at_least(f"{row['text']}, MB/s", row["median MB/s"], BAR_MB_S) for row in rows],
    )
