"""Build, check and time everything that needs a GPU: `python3 -m benchmarks.gpu`, under nine minutes.

Needs python3 with torch and pytest, nvcc and one GPU; no network and no installation. Stages run one after the other
and what each found is written at once, so that a run which is cut off leaves what it had: docs/benchmarks/gpu.json and
gpu.md (--output for another place).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_operator_cases import Case, Sizes, cases, products
from benchmarks.gpu_step import (
    host_bound_config,
    layers_that_fit,
    measure,
    model_config,
    our_config,
    our_step,
    peer_step,
    release,
)
from benchmarks.gpu_timing import copy_bandwidth, product_flops, seconds_of
from benchmarks.result import RESULTS, machine, table
from csrc.build import build
from megatrain.config import load_config
from megatrain.config.config import Config
from megatrain.device_memory import let_segments_grow, set_allocator
from megatrain.ops.cross_entropy import summed_cross_entropy
from megatrain.telemetry.flops import peak_flops

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 540.0
SANITIZED_TESTS = "test_normalization or test_activation or test_cross_entropy or test_quantization"
PARITY_STEPS = 10
OFFLOAD_LAYERS = 8
PARITY_BOUND = 2e-2
"""Relative, of each of ten losses in bf16: tests/gpu/test_gpu_smoke.py holds the small models to the same."""


class Record:
    """What was found so far, on disk after each stage."""

    def __init__(self, directory: Path, command: str) -> None:
        self._directory = directory
        self.document: dict[str, Any] = {
            "name": "gpu", "date": datetime.now(UTC).strftime("%Y-%m-%d"), "command": command, "machine": machine(),
            "stages": {},
        }  # fmt: skip

    def add(self, stage: str, found: Any, seconds: float) -> None:
        self.document["stages"][stage] = {"seconds": round(seconds, 1), "found": found}
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "gpu.json").write_text(json.dumps(self.document, indent=2) + "\n")
        (self._directory / "gpu.md").write_text(markdown(self.document))


def markdown(document: dict[str, Any]) -> str:
    """Return the record for people."""
    facts = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    lines = [
        "# One GPU: kernels and whole steps",
        "",
        f"{document['date']}, {facts}.",
        f"Command: `{document['command']}`.",
    ]
    for name, stage in document["stages"].items():
        lines += ["", f"## {name} ({stage['seconds']} s)", ""]
        found = stage["found"]
        if isinstance(found, list) and found:
            lines.append(table(found))
        else:
            lines += [f"- {key}: {value}" for key, value in found.items()] if isinstance(found, dict) else [str(found)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the stages. Exit code 2 without a GPU, 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of gpu.json and gpu.md")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="no stage starts later (default %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no GPU on this machine", file=sys.stderr)
        return 2
    let_segments_grow(os.environ, set_allocator)
    started = time.perf_counter()
    record = Record(args.output, "python3 -m benchmarks.gpu")
    has_failed = False
    for name, stage in stages().items():
        elapsed = time.perf_counter() - started
        if elapsed > args.budget_s:
            record.add(name, "not reached: the time was up", 0.0)
            continue
        try:
            found = stage(record.document)
        except Exception:  # noqa: BLE001 - one stage that breaks must not hide what the others find
            found = {"failed": traceback.format_exc(limit=-3)}
        has_failed |= isinstance(found, dict) and bool(found.get("failed"))
        record.add(name, found, time.perf_counter() - started - elapsed)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        release()
    print((args.output / "gpu.md").read_text())
    return int(has_failed)


def stages() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return the stages in order, the most important first. Each is given the document so far."""
    return {
        "Ceilings": lambda _: {"copy, TB/s": copy_bandwidth() / 1e12, "bf16 product, TFLOP/s": product_flops() / 1e12},
        "Build": lambda _: _build(),
        "Checks": lambda _: _checks(),
        "Memory-bound operations": _operations,
        "Cross entropy, memory": lambda _: _loss_memory(),
        "Weight gradients added in fp32": lambda _: _products(),
        "Whole steps": lambda _: _steps(),
        "Ten steps of 125M beside the CPU": lambda _: _parity(),
        "125M by micro-batches of one sample": lambda _: _host_bound_steps(),
        "Activation offload": lambda _: _offload(),
        "Sanitizers": lambda _: _sanitizers(),
    }


def _build() -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}.{minor}{'a' if major >= 9 else ''}"
    build(ROOT / "megatrain" / "_C.abi3.so", [architecture], jobs=16)
    return {"architecture": architecture}


def _checks() -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/ops", "tests/gpu"]
    done = _run([*command, "--kernels=cuda"], 240)
    return {"summary": done.splitlines()[-1] if done else "", "failed": _failures(done)}


def _sanitizers() -> dict[str, Any]:
    if shutil.which("compute-sanitizer") is None:
        return {"not measured": "compute-sanitizer is not on this machine"}
    found = {}
    for tool in ("memcheck", "racecheck"):
        tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/unit/ops", "--kernels=cuda"]
        command = ["compute-sanitizer", "--tool", tool, sys.executable, *tests, "-k", SANITIZED_TESTS]
        lines = _run(command, 100).splitlines()
        found[tool] = next(
            (line for line in reversed(lines) if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line), ""
        )
    return found


def _run(command: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        return f"{(error.stdout or b'').decode()[-2000:]}\nFAILED: stopped after {timeout_s:.0f} s"
    return done.stdout + done.stderr


def _failures(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR).*$", output, re.MULTILINE)[:20]


def _operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    bandwidth = document["stages"]["Ceilings"]["found"]["copy, TB/s"] * 1e12
    rows = []
    for case in cases(Sizes(), torch.device("cuda")):
        rows.append(_operation(case, bandwidth))
        release()
    return rows


def _operation(case: Case, bandwidth: float) -> dict[str, Any]:
    ours = seconds_of(case.ours())
    row: dict[str, Any] = {
        "operation": case.name,
        "ours, us": ours * 1e6,
        "of copy bandwidth": case.num_bytes / ours / bandwidth,
    }
    for name, wrap in (("eager", lambda one: one), ("compiled", torch.compile)):
        try:
            row[f"{name} / ours"] = seconds_of(case.theirs(wrap)) / ours if case.theirs else ""
        except Exception as error:  # noqa: BLE001 - a peer that cannot be recorded is said, and the rest goes on
            row[f"{name} / ours"] = f"none: {str(error).splitlines()[0][:60]}"
        release()
    return row


def _products() -> list[dict[str, Any]]:
    """Time the products that add to a sum: whether torch's is as fast as one that adds to nothing."""
    rows = []
    for name, flops, ways in products(Sizes(), torch.device("cuda")):
        row: dict[str, Any] = {"gradient of": name}
        for way, make in ways.items():
            try:
                row[f"{way}, TFLOP/s"] = flops / seconds_of(make()) / 1e12
            except Exception as error:  # noqa: BLE001 - a way that torch does not have is said, and the rest goes on
                row[f"{way}, TFLOP/s"] = f"none: {str(error).splitlines()[0][:60]}"
            release()
        rows.append(row)
    return rows


def _loss_memory() -> dict[str, Any]:
    tokens, vocab = 8192, 128256
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).requires_grad_()
    before = torch.cuda.memory_allocated() - logits.nbytes
    torch.cuda.reset_peak_memory_stats()
    summed_cross_entropy(logits, labels, vocab).backward()
    peak = torch.cuda.max_memory_allocated() - before
    return {"peak / bf16 logits": peak / logits.nbytes}


def _steps() -> list[dict[str, Any]]:
    device = torch.device("cuda")
    num_layers = layers_that_fit(torch.cuda.get_device_properties(device).total_memory, model_config(1))
    model = model_config(num_layers)
    rows = _timed_sides(
        model,
        {
            "ours, bf16": our_config(model),
            "plain torch, compiled": None,
            "ours, FP8 delayed": our_config(model, fp8={"recipe": "tensorwise", "scaling": "delayed"}),
            "ours, FP8 current": our_config(model, fp8={"recipe": "tensorwise"}),
            "ours, FP8 by row": our_config(model, fp8={"recipe": "rowwise"}),
        },
    )
    return beside(rows, "ours, bf16")


def _offload() -> list[dict[str, Any]]:
    """Time a model of few layers with their activations on the GPU and on the host."""
    model = model_config(OFFLOAD_LAYERS)
    sides: dict[str, Config | None] = {}
    for recompute in ("selective", "full"):
        for num_offloaded in (0, OFFLOAD_LAYERS // 2, OFFLOAD_LAYERS - 1):
            parallel = {"recompute": recompute, "offload_layers": num_offloaded}
            sides[f"{recompute} recompute, {num_offloaded} offloaded"] = our_config(model, parallel=parallel)
    return beside(_timed_sides(model, sides), "selective recompute, 0 offloaded")


def _timed_sides(model: dict[str, Any], sides: dict[str, Config | None]) -> list[dict[str, Any]]:
    """Return the figures of each side, one after the other; a side without a configuration is the peer."""
    device = torch.device("cuda")
    # what MFU is counted against: the data sheet's figure, or of an unknown GPU what a large product reaches
    peak = peak_flops(torch.cuda.get_device_name(device)) or product_flops()
    tokens = torch.randint(0, model["vocab_size"], (model["seq_len"] + 1, 1))
    rows: list[dict[str, Any]] = []
    for name, config in sides.items():
        row, trainer = {"side": name, "layers": model["num_layers"]}, None
        try:
            if config is None:
                step = peer_step(model, device, is_compiled=True)
            else:
                step, trainer = our_step(config, device)
            row |= asdict(measure(step, config or our_config(model), tokens, peak))
        except torch.cuda.OutOfMemoryError as error:
            row["seconds"] = str(error).splitlines()[0][:80]
        finally:
            if trainer is not None:
                trainer.close()
            step = trainer = None
            release()
        rows.append(row)
    return rows


def beside(rows: list[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    """Add to each row its time beside that of the side `base`, and fill what a side did not come to."""
    found = next((row["seconds"] for row in rows if row["side"] == base), None)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for row in rows:
        is_timed = isinstance(row["seconds"], float) and isinstance(found, float)
        row[f"seconds / {base}"] = row["seconds"] / found if is_timed else ""
        row |= {key: row.get(key, "") for key in keys}
    return rows


def _host_bound_steps() -> list[dict[str, Any]]:
    """Time the same steps launched by Python and replayed from CUDA graphs; their losses stand beside them."""
    device = torch.device("cuda")
    peak = peak_flops(torch.cuda.get_device_name(device)) or product_flops()
    base = load_config(ROOT / "configs" / "gpt_125m.toml", []).config
    rows: list[dict[str, Any]] = []
    for name, has_graphs in (("launched by Python", False), ("CUDA graphs", True)):
        config = host_bound_config(base, cuda_graphs=has_graphs)
        generator = torch.Generator().manual_seed(0)
        shape = (config.model.seq_len + 1, config.batch.global_batch_size)
        tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        step, trainer = our_step(config, device)
        figures = measure(step, config, tokens, peak)
        trainer.close()
        rows.append({"side": name, "ms a step": figures.seconds * 1e3} | asdict(figures))
        step = trainer = None
        release()
    return rows


def _parity() -> dict[str, Any]:
    """Train the 125M configuration on both devices, on shorter samples so that the CPU is done in seconds."""
    changes = ["--model.seq_len=256", "--batch.micro_batch_size=1", "--batch.global_batch_size=1"]
    config = load_config(ROOT / "configs" / "gpt_125m.toml", changes).config
    generator = torch.Generator().manual_seed(0)
    shape = (config.model.seq_len + 1, 1)
    batches = [torch.randint(0, config.model.vocab_size, shape, generator=generator) for _ in range(PARITY_STEPS)]
    losses: dict[str, list[float]] = {}
    for device in ("cuda", "cpu"):
        step, trainer = our_step(config, torch.device(device))
        losses[device] = [step(tokens) for tokens in batches]
        trainer.close()
    worst = max(abs(a - b) / b for a, b in zip(losses["cuda"], losses["cpu"], strict=True))
    return {
        "largest difference of a loss, relative": worst,
        "bound": PARITY_BOUND,
        "failed": [] if worst <= PARITY_BOUND else [f"losses differ by {worst:.2g}"],
        **losses,
    }


if __name__ == "__main__":
    sys.exit(main())
