"""Checks the run directory's disk, and the tmpfs for black boxes and the buffers of communication libraries."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.contracts.files.own_files import NotOwnError, check_own_directory
from megatrain.run_files.run_directory import own_box_directory
from megatrain_launcher.health.context import HealthContext, HealthFinding, failed, passed, skipped, warning
from megatrain_launcher.health.history import HealthHistory

DISK_NAMES = ("disk",)
SHARED_MEMORY_NAMES = ("shared-memory",)
DEADLINE_S = 20.0
GB = 1_000_000_000
MIB = 1 << 20
FEW_FILES = 1000
SLOW_WRITE_S = 5.0
SHARED_MEMORY_RESERVE_BYTES = 64 * MIB
"""Space for NCCL and gloo in addition to black boxes; a container's tmpfs has only 64 MiB in all by default."""


def check_disk(context: HealthContext, history: HealthHistory) -> tuple[HealthFinding, ...]:
    """Run a probe that writes a small file to the run directory, and check the free space."""
    del history
    end = context.probe(
        "disk_probe",
        [str(context.run_directory)],
        environment=context.environment,
        deadline_s=DEADLINE_S - 5.0,
    )
    where = f"run directory {context.run_directory}"
    try:
        answer = json.loads(end.output) if end.is_complete else {"error": end.problem}
    except ValueError:
        answer = {"error": f"the probe's answer cannot be read: {end.output[:100]!r}"}
    return (judge_disk(answer, where, context.recovery.min_free_disk_gb),)


def judge_disk(answer: dict[str, Any], where: str, min_free_gb: float) -> HealthFinding:
    """Judge the output of the disk probe."""
    (name,) = DISK_NAMES
    if "error" in answer:
        return failed(name, f"{where} cannot be written: {answer['error']}")
    free_gb = answer["free_bytes"] / GB
    state = f"{free_gb:.1f} of {answer['total_bytes'] / GB:.1f} GB free on the disk of {where}"
    files = answer["free_files"]
    if free_gb < min_free_gb:
        problem = f"{state}; recovery.min_free_disk_gb={min_free_gb:g}: free some, or name another job.run_directory"
        finding = failed(name, problem)
    elif files is not None and files < FEW_FILES:
        finding = failed(name, f"{state}, but only {files} more files fit (inodes)")
    elif answer["write_s"] > SLOW_WRITE_S:
        finding = warning(name, f"{state}; writing and syncing 64 KiB took {answer['write_s']:.1f} s")
    else:
        finding = passed(name, state)
    return replace(finding, value=free_gb, unit="GB")


def check_shared_memory(context: HealthContext, history: HealthHistory) -> tuple[HealthFinding, ...]:
    """Check that the black boxes of all workers fit into the tmpfs."""
    del history
    directory = context.shared_memory
    if directory is None:
        return (skipped(SHARED_MEMORY_NAMES[0], 'telemetry.black_box_directory is ""'),)
    return (judge_shared_memory(directory, context.shared_memory_bytes, _free_bytes(directory)),)


def judge_shared_memory(directory: Path, needed_bytes: int, free: int | str) -> HealthFinding:
    """Judge the free bytes of a tmpfs; if they are unknown, `free` is the reason as text."""
    (name,) = SHARED_MEMORY_NAMES
    if isinstance(free, str):
        text = f"telemetry.black_box_directory={directory} cannot be used: {free}"
        return failed(name, f"{text}; fix this, or set another directory")
    state = f"{free / MIB:.0f} MiB free in {directory}; black boxes take {needed_bytes / MIB:.0f} MiB"
    advice = "enlarge it (containers: --shm-size), or lower telemetry.black_box_records"
    if free < needed_bytes:
        finding = failed(name, f"{state}; {advice}")
    elif free < needed_bytes + SHARED_MEMORY_RESERVE_BYTES:
        finding = warning(name, f"{state}: little is left for NCCL and gloo; {advice}")
    else:
        finding = passed(name, state)
    return replace(finding, value=free / MIB, unit="MiB")


def _free_bytes(directory: Path) -> int | str:
    try:
        space = os.statvfs(directory)
        with suppress(FileNotFoundError):  # the directory is made with the first black box
            check_own_directory(own_box_directory(directory))
    except NotOwnError as error:
        return f"{error.filename} {error.strerror}; remove it"
    except OSError as error:
        return error.strerror or str(error)
    if not os.access(directory, os.W_OK):
        return "no permission to write"
    return space.f_bavail * space.f_frsize
