"""Runs a probe: a program of this package that may hang or crash, isolated from its caller.

A child that hangs in the kernel cannot be killed; it is abandoned, so that the caller gets a result in time. A probe is
killed when the process that started it exits for any reason (`guard_probe`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from megatrain.contracts.exit_codes import end_text
from megatrain.programs.processes import install_parent_death_guard

_PACKAGE = "megatrain_launcher.health"
_MAX_SHOWN = 300
_KILLED_S = 1.0


@dataclass(frozen=True, slots=True)
class ProbeEnd:
    """The end of a probe. `exit_code` is None if it did not exit in time, negative for a signal."""

    exit_code: int | None
    output: str
    errors: str
    deadline_s: float

    @property
    def is_complete(self) -> bool:
        return self.exit_code == 0

    @property
    def problem(self) -> str:
        """The end of the probe, with the last line of its stderr."""
        if self.exit_code is None:
            return f"its probe did not end within {self.deadline_s:g} s"
        how = f"its probe {end_text(self.exit_code)}"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return f"{how}: {lines[-1][:_MAX_SHOWN]}" if lines else how


def device_environment(environment: Mapping[str, str], interface: str) -> dict[str, str]:
    """Return the environment for a probe that uses devices and the network interface `interface` (empty: any)."""
    more = {
        # count devices with NVML: a count through CUDA initializes it, and forked children could not use CUDA any more
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if interface:
        # these variables are the only way to choose the interface of gloo and NCCL
        more |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {**environment, **more}


class ProbeRunner(Protocol):
    """Runs the module `name` of this package as a program and returns how it ended."""

    def __call__(
        self, name: str, arguments: Sequence[str], *, environment: Mapping[str, str], deadline_s: float
    ) -> ProbeEnd:
        """Wait until the program exits; at the deadline, kill it with all its children."""


def run_probe(name: str, arguments: Sequence[str], *, environment: Mapping[str, str], deadline_s: float) -> ProbeEnd:
    """Run a probe in a new Python process. Raises: OSError when no process can be started."""
    command = [sys.executable, "-m", f"{_PACKAGE}.{name}", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,
        text=True,
        errors="replace",
    )
    exit_code: int | None = None
    try:
        output, errors = process.communicate(timeout=deadline_s)
        exit_code = process.returncode
    except subprocess.TimeoutExpired:
        output, errors = _kill(process)
    except BaseException:
        _kill(process)
        raise
    return ProbeEnd(exit_code, output, errors, deadline_s)


def _kill(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill a probe with its children and return its output; abandon a probe that is stuck in the kernel."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_KILLED_S)
    except subprocess.TimeoutExpired as late:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return _text(late.stdout), _text(late.stderr)


def _text(raw: bytes | str | None) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw or ""


PARENT_VARIABLE = "MEGATRAIN_PROBE_PARENT"


def guard_probe() -> None:
    """Install a parent-death guard; the environment names the process that started this probe."""
    install_parent_death_guard(int(os.environ.get(PARENT_VARIABLE, os.getppid())))
