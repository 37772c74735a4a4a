"""Times a single device: a matrix multiplication and copies of memory. Loads torch, so probes import it late.

Several calls are timed together, and the best of REPETITIONS such times counts: other load slows down some repetitions,
but a slow device slows down all of them.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.contracts.files.system_files import system_text

REPETITIONS = 7
CPU_MATRIX_SIZE = 768
GPU_MATRIX_SIZE = 4096
CPU_COPY_BYTES = 64 << 20
GPU_COPY_BYTES = 512 << 20
CPU_IN_ONE = 4
GPU_IN_ONE = 50
"""The number of calls that are timed together: tens of ms, far above the cost of clock reads and kernel launches."""


def resolve_device(wanted: str) -> tuple[str, int]:
    """Return "cpu" or "cuda", and the number of devices. Raises: RuntimeError if "cuda" is wanted and there is none."""
    import torch

    num_gpus = torch.cuda.device_count() if wanted != "cpu" and torch.version.cuda is not None else 0
    if wanted == "cuda" and not num_gpus:
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        raise RuntimeError(f"torch sees no CUDA device ({built}); see the gpu-driver check")
    return ("cuda", num_gpus) if num_gpus else ("cpu", 1)


def hardware_name(device_type: str) -> str:
    """Return the CUDA version, or the processor and torch's threads; times with different texts are not compared."""
    import torch

    if device_type == "cuda":
        return f"cuda {torch.version.cuda}"
    return f"{_processor()} x{torch.get_num_threads()}"


def measure_compute(device_type: str, index: int) -> dict[str, Any]:
    """Return the times of one device (matmul_s, copy_s, on a GPU also host_copy_s), and whether results are repeatable.

    Raises: RuntimeError when the device fails.
    """
    import torch

    device = torch.device(device_type, index) if device_type == "cuda" else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(1)
    size = GPU_MATRIX_SIZE if device_type == "cuda" else CPU_MATRIX_SIZE
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    first, second = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    expected = first @ second
    product = torch.empty_like(expected)
    answer: dict[str, Any] = {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device_type == "cuda" else "",
        "matmul_s": _best(lambda: torch.matmul(first, second, out=product), device),
    }
    answer["is_repeatable"] = bool(torch.equal(product, expected)) and bool(torch.isfinite(product).all())
    num_bytes = GPU_COPY_BYTES if device_type == "cuda" else CPU_COPY_BYTES
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    answer["copy_s"] = _best(lambda: target.copy_(source), device)
    if device_type == "cuda":
        pinned = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
        answer["host_copy_s"] = _best(lambda: target.copy_(pinned, non_blocking=True), device)
    answer["is_repeatable"] = answer["is_repeatable"] and bool(torch.equal(source, target))
    return answer


def measure_matmul(device_type: str, index: int) -> float:
    """Return the best time, in seconds, of a batch of matmuls. Raises: RuntimeError when the device fails."""
    import torch

    device = torch.device(device_type, index) if device_type == "cuda" else torch.device("cpu")
    size = GPU_MATRIX_SIZE if device_type == "cuda" else CPU_MATRIX_SIZE
    first = torch.ones(size, size, device=device, dtype=torch.bfloat16 if device_type == "cuda" else torch.float32)
    product = torch.empty_like(first)
    return _best(lambda: torch.matmul(first, first, out=product), device)


def _best(work: Callable[[], Any], device: Any) -> float:
    work()  # the first call allocates memory and chooses an algorithm
    return min(_timed(work, device) for _ in range(REPETITIONS))


def _timed(work: Callable[[], Any], device: Any) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(GPU_IN_ONE if device.type == "cuda" else CPU_IN_ONE):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _processor() -> str:
    for line in system_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
