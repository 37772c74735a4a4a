"""Pictures per CPU second of a producer, beside a bare DALI pipeline of the same shards.

Both sides decode JPEG files of 640 x 480 and resize them to 224 x 224, in one thread on one core. The producer is asked
by sample number: it reads each picture by the index, checks it, cuts it into patches, and sends it with its hash. The
sides take turns, in the opposite order in every second round. The shards are in the page cache.
Needs NVIDIA DALI, which `make test-dali` installs:
PYTHONPATH=.venv/dali python -m benchmarks pictures [--write]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bars import at_least
from benchmarks.pictures_sides import FORMAT, HEIGHT, WIDTH, Decoding, bare_side, producer_side, write_shard
from benchmarks.result import MissingPartError, Result
from megatrain.data.pictures.dali_package import find_dali
from megatrain.data.pictures.picture_index import build_index

OURS, PEER = "megatrain", "DALI pipeline"
ROUNDS = 7
ROUND_PICTURES = 320
PICTURES = 320
BAR = 0.90


def run(num_rounds: int = ROUNDS, round_pictures: int = ROUND_PICTURES, num_pictures: int = PICTURES) -> Result:
    """Draw pictures, then decode them on both sides. Raises: MissingPartError without DALI."""
    found = find_dali()
    if found.problem:
        raise MissingPartError("dali", f"{found.problem}; `make test-dali` installs it, then set PYTHONPATH=.venv/dali")
    decodings: dict[str, list[Decoding]] = {OURS: [], PEER: []}
    with tempfile.TemporaryDirectory(prefix="pictures-") as name, ExitStack() as processes:
        directory = Path(name)
        mean_bytes = write_shard(directory / "shard.tar", num_pictures)
        build_index(directory)
        sides = {
            OURS: processes.enter_context(producer_side(directory)),
            PEER: processes.enter_context(bare_side(directory)),
        }
        for decode in sides.values():
            decode(0, 32)  # builds the pipeline
        for turn in range(num_rounds):
            for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                decodings[side].append(sides[side](turn * round_pictures, round_pictures))
    ratio = _rate(decodings[OURS]) / _rate(decodings[PEER])
    return Result(
        name="pictures",
        title=f"Pictures of {WIDTH} x {HEIGHT}, decoded and resized to {FORMAT.size} x {FORMAT.size} on one core",
        command="PYTHONPATH=.venv/dali python -m benchmarks pictures --write",
        rows=[_row(side, decodings) for side in decodings],
        notes=[
            f"medians of {num_rounds} rounds a side, in turn, of {round_pictures} pictures each",
            f"{OURS}: a producer, asked by sample number over a socket; its CPU time, without that of the requester",
            f"{PEER}: reads the same shards in their order, and drops its output",
            f"pictures/cpu s: per second of CPU time, all threads; ratio: / that of {PEER}",
        ],
        settings={"pictures": num_pictures, "mean_bytes": mean_bytes, "dali": found.version},
        bars=[at_least(f"pictures per CPU second / those of {PEER}", ratio, BAR)],
    )


def _rates(some: Sequence[Decoding]) -> list[float]:
    return [one.num_pictures / one.cpu_s for one in some]


def _rate(some: Sequence[Decoding]) -> float:
    return statistics.median(_rates(some))


def _row(side: str, decodings: Mapping[str, Sequence[Decoding]]) -> dict[str, Any]:
    some = decodings[side]
    return {
        "side": side,
        "pictures/cpu s": _rate(some),
        "least": min(_rates(some)),
        "most": max(_rates(some)),
        "cpu ms": 1000 / _rate(some),
        "pictures/s": statistics.median(one.num_pictures / one.seconds for one in some),
        "ratio": _rate(some) / _rate(decodings[PEER]),
    }
