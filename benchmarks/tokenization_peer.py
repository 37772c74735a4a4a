"""The peer of `tokenization`: the tokenizers library encodes texts that are in memory, at its fastest settings.

`python -m benchmarks.tokenization_peer TEXT.jsonl tokenizer.json` prints seconds, tokens and settings as JSON. The
environment sets the number of the library's threads.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tokenizers

METHODS = ("encode_batch", "encode_batch_fast")
BATCH_DOCUMENTS = (64, 512, 4096)
TRIAL_BYTES = 2_000_000
TRIALS = 2


def main(source: Path, tokenizer: Path) -> None:
    """Try each setting on the first megabytes, then measure the fastest one on the whole text."""
    backend = tokenizers.Tokenizer.from_file(str(tokenizer))
    backend.encode_special_tokens = True  # text that spells a special token is text
    with source.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    ends = itertools.accumulate(len(text) for text in texts)
    trial = texts[: 1 + sum(end < TRIAL_BYTES for end in ends)]
    seconds = {
        (method, size): min(_encode(backend, method, trial, size)[0] for _ in range(TRIALS))
        for method in METHODS
        for size in BATCH_DOCUMENTS
    }
    method, size = min(seconds, key=lambda setting: seconds[setting])
    found, num_tokens = _encode(backend, method, texts, size)
    print(json.dumps({"seconds": found, "num_tokens": num_tokens, "settings": f"{method} of {size}"}))


def _encode(backend: tokenizers.Tokenizer, method: str, texts: Sequence[str], size: int) -> tuple[float, int]:
    """Return the seconds and the number of tokens."""
    encode = getattr(backend, method)
    num_tokens = 0
    began = time.perf_counter()
    for start in range(0, len(texts), size):
        num_tokens += sum(map(len, encode(texts[start : start + size], add_special_tokens=False)))
    return time.perf_counter() - began, num_tokens


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
