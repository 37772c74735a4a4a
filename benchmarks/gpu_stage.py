"""Run one stage of the GPU benchmark in a process of its own.

Such a process loads the kernels that were just built, frees all its memory when it ends, and can be stopped. An illegal
access makes the GPU unusable only for the process that made it: the next process continues after the figure that
failed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_target
from benchmarks.gpu_record import GpuRecord, GpuStage, Row
from benchmarks.gpu_target import GpuTarget
from megatrain.ops.extension import load_extension, missing_capability
from megatrain.training.device_settings import set_allocator, use_expandable_segments

RUNNING = "running"
OUT_OF_MEMORY = "out of memory"
Work = Callable[[GpuStage, GpuTarget], None]


class BrokenDeviceError(Exception):
    """The GPU is no longer usable in this process."""


def run_stage(
    stages: Mapping[str, Work], arguments: Sequence[str] | None = None, *, without_kernels: Sequence[str] = ()
) -> int:
    """Run the stage that the command line names. The record, not the exit code, shows whether it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--output", type=Path, required=True, help="directory of gpu.json")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny sizes")
    args = parser.parse_args(arguments)
    stage = GpuRecord.read(args.output).stage(args.stage)
    problem = "" if args.rehearse or args.stage in without_kernels else missing_kernels()
    if problem:
        # otherwise the plain PyTorch forms would be measured under the kernels' names
        stage.fail(f"not measured, there are no compiled kernels: {problem}")
    else:
        target = gpu_target.rehearsal() if args.rehearse else gpu_target.gpu()
        if target.is_gpu:
            use_expandable_segments(os.environ, set_allocator)
        # `release` collects garbage after each figure, and no module that is loaded by now is garbage
        gc.freeze()
        stages[args.stage](stage, target)
    stage.change(is_done=True)
    return 0


def missing_kernels() -> str:
    """Return why the compiled kernels do not run on this machine, or ""."""
    extension = load_extension()
    if not extension.is_active:
        return extension.reason
    return missing_capability(extension.architectures, torch.cuda.get_device_capability())


def fill(stage: GpuStage, row: Row, column: str, work: Callable[[], Any], *, is_ours: bool) -> None:
    """Put the result of `work` in a row: a value in its column, or a dictionary of columns. An error is recorded too.

    A column that has a value is not changed, because an earlier process filled it. A column that an earlier process did
    not finish counts as an error. With `is_ours`, an error makes the run fail, except an error of too little memory.
    Raises: BrokenDeviceError where the GPU does not work after an error.
    """
    if column in row and row[column] != RUNNING:
        return
    is_lost = row.get(column) == RUNNING
    row[column] = RUNNING
    stage.record.write()
    found: Any = "the process ended during this measurement"
    is_error = True
    if not is_lost:
        try:
            found, is_error = work(), False
        except Exception as error:  # noqa: BLE001 - the error is recorded in its place, and other figures follow
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
    """Return an error as one line for a table."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    # torch.compile wraps the errors of the code that it runs in its own
    is_memory = any(isinstance(one, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(one).lower() for one in chain)
    line = next((one.strip() for one in str(error).splitlines() if one.strip()), "")
    return f"{OUT_OF_MEMORY if is_memory else type(error).__name__}: {line[:120]}".replace("|", "/")


def is_device_usable() -> bool:
    """Return whether the GPU still computes. It does not after an illegal access, or while a capture is open."""
    if not torch.cuda.is_initialized():
        return True  # nothing of this process has reached it
    try:
        return bool(torch.randn(8, device="cuda").isfinite().all().item())
    except RuntimeError:
        return False


def release() -> None:
    """Free the memory of the last work, and the code that was compiled for it."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
