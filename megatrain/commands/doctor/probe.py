"""Runs a probe: a program that imports a package and reports. The import can crash or hang where a driver is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from megatrain.contracts.exit_codes import exit_text

# Importing torch from a cold network disk takes tens of seconds; a broken driver can hang for ever.
PROBE_TIMEOUT_S = 120


def run_probe(module: str, mark: str) -> tuple[Mapping[str, Any] | None, str]:
    """Run a module as a program. Return (report, ""), or (None, why there is no report).

    mark: begins the line that the program prints; the report is the JSON object after it.
    """
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"installed, but it did not answer within {PROBE_TIMEOUT_S} s"
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return None, f"installed, but importing it failed {exit_text(done.returncode)}: {last_line}"
    # packages that Python loads at startup or exit may print other lines
    line = next((line for line in done.stdout.splitlines() if line.startswith(mark)), "")
    if not line:
        return None, "installed, but the process that imports it reported nothing"
    report: dict[str, Any] = json.loads(line.removeprefix(mark))
    return report, ""
