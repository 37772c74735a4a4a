"""Checks the host's memory: none is missing, some is available, and its error counters do not rise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from megatrain.contracts.files.system_files import system_text
from megatrain.formatting import count_text
from megatrain_launcher.health.context import HealthContext, HealthFinding, failed, passed, skipped, warning
from megatrain_launcher.health.history import HealthHistory

NAMES = ("memory", "memory-errors")
DEADLINE_S = 5.0
GIB = 1 << 30
MISSING_FRACTION = 0.02
"""Tolerance: the kernel's reserved part differs slightly from boot to boot; a lost module is at least 1/32."""
LITTLE_FREE_FRACTION = 0.05
_TOTAL = "memory_bytes"
_SIZE = re.compile(r"(\w+):\s*([0-9]+) kB")


def check_memory(context: HealthContext, history: HealthHistory) -> tuple[HealthFinding, ...]:
    """Read this host's memory sizes and error counters."""
    sizes = read_sizes(context.places.proc / "meminfo")
    controllers = sorted((context.places.sys / "devices/system/edac/mc").glob("mc[0-9]*"))
    corrected = sum(_count(controller / "ce_count") for controller in controllers)
    uncorrected = sum(_count(controller / "ue_count") for controller in controllers)
    before = history.seen.get("memory_corrected_errors")
    errors = (
        judge_errors(corrected, uncorrected, before)
        if controllers
        else skipped(NAMES[1], "the system keeps no counters of memory errors (no EDAC driver)")
    )
    return judge_memory(sizes, history.seen.get(_TOTAL)), errors


def read_sizes(meminfo: Path) -> tuple[int, int] | None:
    """Return the total and available bytes; None if the system does not report them."""
    found = (_SIZE.fullmatch(line) for line in system_text(meminfo).splitlines())
    fields = {size[1]: int(size[2]) * 1024 for size in found if size is not None}
    if not {"MemTotal", "MemAvailable"} <= fields.keys():
        return None
    return fields["MemTotal"], fields["MemAvailable"]


def judge_memory(sizes: tuple[int, int] | None, total_before: float | None) -> HealthFinding:
    """Judge the sizes (total, available) against the earlier total."""
    name = NAMES[0]
    if sizes is None:
        return skipped(name, "the system does not report it")
    total, available = sizes
    state = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if total_before is not None and total < total_before * (1 - MISSING_FRACTION):
        problem = f"{state}; this host had {total_before / GIB:.1f} GiB before: a memory module may be lost"
        finding = failed(name, f"{problem} (if it was taken out on purpose, remove this host's health.json)")
    elif available < total * LITTLE_FREE_FRACTION:
        finding = replace(warning(name, f"{state}: other processes use nearly all of it"), seen={_TOTAL: total})
    else:
        finding = replace(passed(name, state), seen={_TOTAL: total})
    return replace(finding, value=available / GIB, unit="GiB")


def judge_errors(corrected: int, uncorrected: int, corrected_before: float | None) -> HealthFinding:
    """Judge the error counters since boot."""
    name = NAMES[1]
    seen = {"memory_corrected_errors": float(corrected)}
    if uncorrected:
        errors = count_text(uncorrected, "uncorrected memory error")
        return failed(name, f"{errors} since boot; replace the module")
    if corrected_before is not None and corrected > corrected_before:
        more = corrected - int(corrected_before)
        errors = count_text(more, "more corrected memory error")
        return replace(warning(name, f"{errors} than at the last check"), seen=seen)
    return replace(passed(name, f"{count_text(corrected, 'corrected error')} since boot"), seen=seen)


def _count(path: Path) -> int:
    text = system_text(path)
    return int(text) if text.isdigit() else 0
