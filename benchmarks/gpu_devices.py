"""Compare the reader of GPU telemetry with nvidia-smi on a machine with a GPU. The readings are kept as a fixture."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_record import GpuStage

ROOT = Path(__file__).resolve().parent.parent
RECORDED = "gpu-devices.jsonl"
_MIB = 1 << 20
_NUM_SAMPLES = 3
FIELDS: Mapping[str, tuple[str, float, float]] = {
    "temperature.gpu": ("temperature_c", 1.0, 5.0),
    "clocks.max.sm": ("max_sm_clock_mhz", 1.0, 0.0),
    "clocks.max.memory": ("memory_clock_mhz", 1.0, 1e9),  # idle GPUs lower the clock, so any reported value agrees
    "enforced.power.limit": ("power_limit_w", 1.0, 0.01),
    "memory.total": ("memory_total_bytes", _MIB, _MIB),
    "memory.used": ("memory_used_bytes", _MIB, 4096 * _MIB),
    "ecc.errors.corrected.volatile.total": ("corrected_errors", 1.0, 0.0),
    "ecc.errors.uncorrected.volatile.total": ("uncorrected_errors", 1.0, 0.0),
    "ecc.errors.uncorrected.aggregate.total": ("lifetime_uncorrected_errors", 1.0, 0.0),
    "remapped_rows.uncorrectable": ("uncorrected_rows", 1.0, 0.0),
}
"""nvidia-smi's field -> (our field, the factor from nvidia-smi's unit to ours, the greatest difference in our unit)."""


def check_devices(stage: GpuStage, timeout_s: float) -> None:
    """Compare each GPU's newest reading with nvidia-smi, and keep the readings beside the record."""
    if shutil.which("nvidia-smi") is None:
        stage.change(note="not checked: nvidia-smi is not on this machine")
        return
    arguments = ("--interval-s", "0.1", "--count", str(_NUM_SAMPLES))
    command = [sys.executable, "-m", "megatrain_diagnostics.devices", *arguments]
    end = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=timeout_s)
    lines = end.stdout.splitlines()
    if end.returncode != 0 or len(lines) != _NUM_SAMPLES:
        stage.fail(f"exit code {end.returncode}: {end.stderr[-1500:]}")
        return
    sample = json.loads(lines[-1])
    gpus = sample.get("driver", {}).get("gpus", [])
    if not gpus:
        stage.fail(f"no GPU was read: {end.stderr.strip()[-500:] or sample.get('driver')}")
        return
    (stage.record.directory / RECORDED).write_text(end.stdout)
    stage.change(found=compare(gpus, asked_of_nvidia_smi(timeout_s)))
    took_ms = 1e3 * sorted(json.loads(line)["took_s"] for line in lines)[_NUM_SAMPLES // 2]
    stage.change(note=f"a reading of {len(gpus)} GPUs and the links took {took_ms:.1f} ms; recorded in {RECORDED}")
    stage.fail(*(f"{row['field']} of {row['gpu']}: ours {row['ours']}, nvidia-smi {row['nvidia-smi']}"
                 for row in stage.content["found"] if not row["agrees"]))  # fmt: skip


def asked_of_nvidia_smi(timeout_s: float) -> list[dict[str, str]]:
    """Return nvidia-smi's values for each GPU, by field."""
    command = ["nvidia-smi", f"--query-gpu=uuid,{','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    end = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    rows = csv.reader(end.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(("uuid", *FIELDS), row, strict=True)) for row in rows]


def compare(gpus: Sequence[Mapping[str, Any]], asked: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return a row for each GPU and field: both values, and whether they agree. Pure."""
    ours = {gpu["uuid"]: gpu for gpu in gpus}
    found = []
    for row in asked:
        gpu = ours.get(row["uuid"], {})
        for field, (name, factor, apart) in FIELDS.items():
            theirs = _number(row[field])
            value = gpu.get(name)
            if theirs is None or value is None:
                agrees = theirs is None and value is None
            else:
                agrees = abs(value - theirs * factor) <= apart
            found.append(
                {"gpu": row["uuid"], "field": field, "ours": value, "nvidia-smi": row[field], "agrees": agrees}
            )
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported]
        return None


def _environment() -> dict[str, str]:
    places = [ROOT, ROOT / "launcher", ROOT / "diagnostics"]
    path = os.pathsep.join([*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}
