"""One stage of the GPU benchmark, in a process of its own.

A process of its own loads the kernels that were just built, gives all its memory back, and can be stopped. What it
breaks, as an illegal access breaks all that a process has on its GPU, ends with it: the next process goes on behind the
figure that broke.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_record import Record, Row, Stage
from megatrain.device_memory import let_segments_grow, set_allocator
from megatrain.ops.extension import load_extension, missing_capability

RUNNING = "running"
OUT_OF_MEMORY = "out of memory"
Work = Callable[[Stage], None]


class BrokenDeviceError(Exception):
    """This process can do nothing more on its GPU."""


def run_stage(
    stages: Mapping[str, Work], arguments: Sequence[str] | None = None, *, without_kernels: Sequence[str] = ()
) -> int:
    """Run the stage that the command line names. It is done where the record says so, whatever the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--output", type=Path, required=True, help="directory of gpu.json")
    args = parser.parse_args(arguments)
    stage = Record.read(args.output).stage(args.stage)
    problem = "" if args.stage in without_kernels else missing_kernels()
    if problem:
        # the plain PyTorch forms would be measured under the kernels' name
        stage.fail(f"not measured, there are no compiled kernels: {problem}")
    else:
        let_segments_grow(os.environ, set_allocator)
        stages[args.stage](stage)
    stage.change(is_done=True)
    return 0


def missing_kernels() -> str:
    """Return why the compiled kernels do not run here, or ""."""
    extension = load_extension()
    if not extension.is_active:
        return extension.reason
    return missing_capability(extension.architectures, torch.cuda.get_device_capability())


def fill(stage: Stage, row: Row, column: str, work: Callable[[], Any], *, is_ours: bool) -> None:
    """Put what `work` returns in a row: a value in its column, or a dictionary of columns. An error is put there too.

    A column that has a value is left alone: an earlier process came to it. One that it did not come back from counts as
    an error. An error of ours makes the run one that failed; too little memory does not.
    Raises: BrokenDeviceError where the GPU does not work after an error.
    """
    if column in row and row[column] != RUNNING:
        return
    is_lost = row.get(column) == RUNNING
    row[column] = RUNNING
    stage.record.write()
    found: Any = "the process did not come back from it"
    is_error = True
    if not is_lost:
        try:
            found, is_error = work(), False
        except Exception as error:  # noqa: BLE001 - what fails is said in its place, and the rest goes on
            found = described(error)
    if isinstance(found, dict):
        row |= found
    else:
        row[column] = found
    stage.record.write()
    if is_error and is_ours and not found.startswith(OUT_OF_MEMORY):
        stage.fail(f"{next(iter(row.values()))}, {column}: {found}")
    if is_error and not is_lost and not is_device_usable():
        raise BrokenDeviceError(found)
    release()


def described(error: BaseException) -> str:
    """Return an error in a line that a table takes."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    # torch.compile raises errors of its own around those of what it runs
    is_memory = any(isinstance(one, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(one).lower() for one in chain)
    line = next((one.strip() for one in str(error).splitlines() if one.strip()), "")
    return f"{OUT_OF_MEMORY if is_memory else type(error).__name__}: {line[:120]}".replace("|", "/")


def is_device_usable() -> bool:
    """Return whether the GPU still computes: not after an illegal access, nor in a recording that was left open."""
    try:
        return bool(torch.randn(8, device="cuda").isfinite().all().item())
    except RuntimeError:
        return False


def release() -> None:
    """Give the memory of the last work back, with what was compiled for it."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
