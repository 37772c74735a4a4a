"""One data loader for the 8 ranks of a host: its first sample, its memory, what it reads, and what its death costs.

The token files are many sources with real indexes and sparse .bin files, whose tokens are all 0. One process stands for
all ranks and gets the steps of each, at the pace of a training step. The stream of the loader is compared with that of
a single reader, batch by batch.
Run alone on the machine: python -m benchmarks host_loader [--write] [--million-documents N] [--sources N]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bars import Bar, at_most, must_hold
from benchmarks.host_loader_sides import (
    BATCH_SAMPLES,
    PACE_S,
    SEQ_LEN,
    FirstSample,
    HostRun,
    first_sample,
    host_run,
    is_resized_stream_the_same,
)
from benchmarks.result import Result
from megatrain.contracts.layout import Layout
from megatrain.data.indexed import INDEX_HEADER, INDEX_MAGIC, INDEX_VERSION

LAYOUTS = {
    "1 replica": Layout(),
    "8 replicas": Layout(dp_size=8),
    "2 replicas of 4 ranks": Layout(tp_size=4, dp_size=2),
}
NUM_STEPS = 60
FIRST_SAMPLE_BAR, FIRST_MEMORY_BAR = 2.0, 300.0
LOADER_MEMORY_BAR = READ_BAR = 1.1
LATE_BAR, WAIT_BAR = 0.5, 0.01
RESIZED_STEPS = 4
SEED = 1


def run(million_documents: float, num_sources: int, num_steps: int = NUM_STEPS) -> Result:
    """Write the sources, open them, and run hosts of one rank and of 8, whose loader is killed once in one run."""
    with tempfile.TemporaryDirectory(prefix="host-loader-") as directory:
        prefixes = _write_sources(Path(directory), round(million_documents * 1e6), num_sources)
        first_sample(prefixes)  # the index is in the page cache from here on
        opened = first_sample(prefixes)
        runs = {name: host_run(prefixes, layout, num_steps) for name, layout in LAYOUTS.items()}
        killed = host_run(prefixes, LAYOUTS["8 replicas"], num_steps, is_killed=True)
        is_same_resized = is_resized_stream_the_same(prefixes, RESIZED_STEPS)
    rows = [_row(name, one) for name, one in runs.items()]
    return Result(
        name="host-loader",
        title=f"One data loader a host: {num_sources} sources, {million_documents:g} million documents",
        command="python -m benchmarks host_loader --write",
        rows=[*rows, _row("8 replicas, loader killed", killed)],
        notes=[
            f"{num_steps} steps of {BATCH_SAMPLES} samples of {SEQ_LEN:,} tokens; a step computes {PACE_S * 1e3:g} ms",
            "first sample: from opening the files, in the page cache, to the first batch in one process; no imports",
            "memory: private memory of a process, without the mapped indexes and the ring",
            "read / used, from the first batch to the middle: bytes of reads of the loader / of the batches' tokens",
            "data wait: the time that the rank with the longest wait takes to get its batch / the time of all steps",
            "longest wait: of one step; after the kill, a new loader opens the files",
        ],
        settings={
            "first sample s": opened.seconds,
            "CPU s": opened.cpu_s,
            "memory MB": opened.memory_mb,
            "documents": round(million_documents * 1e6),
        },
        bars=[
            *_bars(opened, runs, killed),
            must_hold("8, 7, 3, 8 replicas and two stages: the samples of a single reader", is_same_resized),
        ],
    )


def _write_sources(root: Path, num_documents: int, num_sources: int) -> list[Path]:
    """Write indexes with documents of 100 to 1,100 tokens, and .bin files as long as they state. No two are equal."""
    random = np.random.default_rng(SEED)
    prefixes = []
    for number in range(num_sources):
        count = num_documents // num_sources + number
        lengths = random.integers(100, 1100, count)
        ends = np.cumsum(2 * lengths)
        arrays = (lengths.astype("<i4"), (ends - 2 * lengths).astype("<i8"), np.arange(count + 1, dtype="<i8"))
        prefix = root / f"source-{number}"
        header = INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, 8, count, count + 1)
        prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
        with prefix.with_suffix(".bin").open("wb") as file:
            file.truncate(int(ends[-1]))
        prefixes.append(prefix)
    return prefixes


def _bars(opened: FirstSample, runs: dict[str, HostRun], killed: HostRun) -> Sequence[Bar]:
    one, whole, mixed = (runs[layout] for layout in LAYOUTS)
    usual = max(whole.waits_s)
    return [
        at_most("seconds to the first sample", opened.seconds, FIRST_SAMPLE_BAR),
        at_most("memory at the first sample, MB", opened.memory_mb, FIRST_MEMORY_BAR),
        at_most("memory of the loader, 8 ranks / 1 rank", whole.memory_mb / one.memory_mb, LOADER_MEMORY_BAR),
        at_most("bytes read / used, 2 replicas of 4 ranks", mixed.num_read / mixed.num_used, READ_BAR),
        at_most("seconds that a killed loader is late", max(killed.waits_s) - usual, LATE_BAR),
        must_hold("every batch is that of a single reader", all(run.is_same for run in (*runs.values(), killed))),
        at_most("data wait, 8 replicas", sum(whole.waits_s) / whole.seconds, WAIT_BAR),
    ]


def _row(case: str, run: HostRun) -> dict[str, Any]:
    return {
        "case": case,
        "loader MB": run.memory_mb,
        "read / used": run.num_read / run.num_used,
        "data wait": sum(run.waits_s) / run.seconds,
        "longest wait s": max(run.waits_s),
        "same stream": "yes" if run.is_same else "no",
    }
