"""The speed of what-if analysis: compared with the public tool on one of its traces, and at 12,288 ranks.

The peer is the artifact of "Understanding Stragglers in Large Model Training" (OSDI'25), github.com/ByteDance-Seed/
StragglerAnalysis: MEGATRAIN_STRAGGLER_TOOL names a checkout, MEGATRAIN_STRAGGLER_PYTHON a Python with its dependencies
(pandas < 3). The peer's times are of wia.py, which computes neither M_W nor M_S; ours are of all figures.
Run alone on the machine: python -m benchmarks whatif [--write]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bars import at_least
from benchmarks.result import Result
from tests.helpers.source_tree import ROOT

TRACES_VARIABLE = "MEGATRAIN_STRAGGLER_TRACES"
TOOL_VARIABLE = "MEGATRAIN_STRAGGLER_TOOL"
PYTHON_VARIABLE = "MEGATRAIN_STRAGGLER_PYTHON"
TRACE = "SE"
REPEATS = 9
NOT_MEASURED = "not measured"

# Each program times only the analysis, after all imports, and prints the seconds.
_OURS = """
import sys, time
from pathlib import Path
from megatrain_diagnostics.analysis.whatif import make_model, what_if
from megatrain_diagnostics.analysis.whatif.figures import public_figures
from megatrain_diagnostics.store.public_trace import read_meta, read_trace
started = time.perf_counter()
shape = read_meta(Path(sys.argv[2]))
public_figures(what_if(make_model(read_trace(Path(sys.argv[1])), shape)), shape)
print(time.perf_counter() - started)
"""
_PEER = """
import sys, time
import yaml
from analyzer.metatypes import JobMeta
from analyzer.wia import WhatIfAnalyzer
started = time.perf_counter()
WhatIfAnalyzer(sys.argv[1], root=None, steps=None).analyze(JobMeta(**yaml.safe_load(open(sys.argv[2]))))
print(time.perf_counter() - started)
"""

Timer = Callable[[], float]


def run() -> Result:
    """Measure both sides in turn, then the large job."""
    rows: list[dict[str, object]] = []
    notes = []
    directory = Path(os.environ.get(TRACES_VARIABLE, ROOT.parent / "shared/data/straggler_traces")) / TRACE
    if directory.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            rows += _beside_the_peer(_timers(directory, Path(scratch)))
    else:
        notes.append(f"Trace {TRACE} was not there ({TRACES_VARIABLE} names its directory).")
    scale = json.loads(_output([sys.executable, "-m", "benchmarks.whatif_scale"], {}))
    rows.append(
        {
            "what": f"{scale['ranks']:,} ranks x 10 steps, {scale['operations']:,} operations",
            "ours, s": scale["analysis_s"],
            "public tool, s": NOT_MEASURED,
            "times as fast": f"peak memory {scale['peak_gb']:.2f} GB",
        }
    )
    return Result(
        name="whatif",
        title="How fast what-if analysis is",
        command="python -m benchmarks whatif --write",
        rows=rows,
        notes=[
            *notes,
            f"Trace {TRACE} (128 ranks, 43 steps, 107,328 operations): medians of {REPEATS} runs, both sides in turn.",
            "Ours computes all figures of the public tool's three programs; its times are of the first (wia.py) only.",
            "Analysis: from the files to the figures, after all imports. Process: the whole command.",
            "The large job: pp 8, dp 192, tp 8, 6 chunks, 32 micro-batches, reduced over tp; all figures.",
            f"Of its time {scale['model_s']:.1f} s arrange the operations and {scale['figures_s']:.1f} s replay them.",
            "Its peak memory is that of the whole process, the generated job included.",
        ],
        bars=[
            at_least(f"{row['what']}: the public tool's seconds / ours", row["times as fast"], 1.0)
            for row in rows
            if isinstance(row["times as fast"], float)
        ],
    )


def _beside_the_peer(timers: dict[str, tuple[Timer, Timer | None]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, (ours, peer) in timers.items():
        own_times, peer_times = [], []
        for _ in range(REPEATS):
            own_times.append(ours())
            if peer is not None:
                peer_times.append(peer())
        own = statistics.median(own_times)
        row: dict[str, object] = {"what": name, "ours, s": own}
        row["public tool, s"] = statistics.median(peer_times) if peer_times else NOT_MEASURED
        row["times as fast"] = statistics.median(peer_times) / own if peer_times else NOT_MEASURED
        rows.append(row)
    return rows


def _timers(directory: Path, scratch: Path) -> dict[str, tuple[Timer, Timer | None]]:
    """Return by measurement the timers of megatrain's side and of the peer; None where there is no peer."""
    trace, meta = str(directory / "trace.parquet"), str(directory / "meta.yaml")
    own_process = [sys.executable, "-m", "megatrain", "diag", "whatif", "--trace", trace, "--meta", meta, "--json"]
    own_analysis = [sys.executable, "-c", _OURS, trace, meta]
    tool, python = os.environ.get(TOOL_VARIABLE), os.environ.get(PYTHON_VARIABLE, sys.executable)
    peer_process = peer_analysis = None
    if tool:
        environment = {"PYTHONPATH": f"{tool}:{tool}/analyzer"}
        command = [python, f"{tool}/analyzer/wia.py", "--trace", trace, "--metadata", meta, "--dump-dir", str(scratch)]
        peer_process = _wall_timer(command, environment)
        peer_analysis = _printed_timer([python, "-c", _PEER, trace, meta], environment)
    return {
        f"analysis of {TRACE}": (_printed_timer(own_analysis, {}), peer_analysis),
        f"whole process, {TRACE}": (_wall_timer(own_process, {}), peer_process),
    }


def _printed_timer(command: Sequence[str], environment: dict[str, str]) -> Timer:
    return lambda: float(_output(command, environment).split()[-1])


def _wall_timer(command: Sequence[str], environment: dict[str, str]) -> Timer:
    def timed() -> float:
        started = time.perf_counter()
        _output(command, environment)
        return time.perf_counter() - started

    return timed


def _output(command: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
