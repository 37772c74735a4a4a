"""Reads the state of GPUs with nvidia-smi, for hosts without NVML's Python binding."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Sequence

from megatrain_job.devices.gpu_readings import DriverReading, GpuReading

_FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
_NEEDED = 4
"""Every version of nvidia-smi knows this many of the first fields; later ones are left out if it does not know them."""
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
# nvidia-smi prints these texts instead of a value if the GPU does not respond.
_BROKEN = re.compile(r"gpu is lost|requires reset|unknown error|fallen off|\berr!", re.IGNORECASE)
_MAX_SHOWN = 300


def read_nvidia_smi(timeout_s: float) -> DriverReading | None:
    """Return nvidia-smi's reading; None if nvidia-smi is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = list(_FIELDS)
    while True:
        command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            end = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return DriverReading("nvidia-smi", error=f"no answer from nvidia-smi within {timeout_s:g} s")
        except OSError as error:
            return DriverReading("nvidia-smi", error=f"{program} cannot be run: {error.strerror}")
        printed = f"{end.stdout}\n{end.stderr}"
        unknown = _UNKNOWN_FIELD.search(printed)
        if unknown and unknown[1] in fields[_NEEDED:]:  # an older program
            fields.remove(unknown[1])
            continue
        return _reading(end.returncode, end.stdout, printed, fields)


def _reading(exit_code: int, output: str, printed: str, fields: Sequence[str]) -> DriverReading:
    if "no devices were found" in printed.lower():
        return DriverReading("nvidia-smi")
    rows, unreadable = [], []
    for line in output.splitlines():  # each on its own, because an open quote would swallow the lines after it
        row = next(csv.reader([line], skipinitialspace=True), [])
        if len(row) == len(fields) and row[0].isascii() and row[0].isdigit():
            rows.append(dict(zip(fields, row, strict=True)))
        elif len(row) > 1:
            unreadable.append(line)
    # Without a driver, or with a wrong library, there are no rows. After a lost GPU, a line of text ends the list.
    messages = [line.strip() for line in printed.splitlines() if line.strip() and not re.match(r"\d+, ", line)]
    problem = messages[0][:_MAX_SHOWN] if messages else f"exit code {exit_code}"
    if not rows:
        return DriverReading("nvidia-smi", error=problem if messages or exit_code else "it names no GPU")
    error = problem if exit_code else ""
    if unreadable and not error:
        error = f"lines that cannot be read: {len(unreadable)}, the first: {unreadable[0][:_MAX_SHOWN]!r}"
    return DriverReading("nvidia-smi", rows[0]["driver_version"], error, tuple(_gpu(row) for row in rows))


def _gpu(row: dict[str, str]) -> GpuReading:
    broken = next((value for value in row.values() if _BROKEN.search(value)), "")
    errors = row.get("ecc.errors.uncorrected.volatile.total", "")
    return GpuReading(
        int(row["index"]),
        row["uuid"],
        row["name"],
        uncorrected_errors=int(errors) if errors.isdigit() else None,
        is_page_retirement_pending=_yes(row.get("retired_pages.pending", "")),
        is_row_remap_pending=_yes(row.get("remapped_rows.pending", "")),
        has_row_remap_failed=_yes(row.get("remapped_rows.failure", "")),
        error=broken.strip("[]"),
    )


def _yes(value: str) -> bool | None:
    """Parse a flag: nvidia-smi prints Yes or No, newer versions 1 or 0, or Enabled or Disabled; else None ([N/A])."""
    return {"yes": True, "1": True, "enabled": True, "no": False, "0": False, "disabled": False}.get(value.lower())
