"""Compiles csrc/ for the CPU, against the headers beside this file, and loads the result."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from csrc.build import KERNELS, OPERATORS, STANDARD, TORCH_FLAGS, include_flags, library_flags

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "emulated-kernels"


def load_emulated_kernels() -> ctypes.CDLL:
    """Register the kernels for CPU tensors in this process, rebuilt when any source has changed."""
    return ctypes.CDLL(str(_built()))


def set_thread_order(kernels: ctypes.CDLL, seed: int) -> None:
    """Run the threads of a block in order (0), from the last to the first (1), or in an order drawn from the seed."""
    kernels.emulated_set_thread_order(ctypes.c_uint(seed))


def count_launches(kernels: ctypes.CDLL) -> int:
    """Return how many kernels this process has launched."""
    kernels.emulated_num_launches.restype = ctypes.c_ulonglong
    return int(kernels.emulated_num_launches())


def _built() -> Path:
    # without the module, which only names the devices it was built for
    operators = [source for source in OPERATORS.glob("*.cpp") if source.name != "module.cpp"]
    sources = sorted([*KERNELS.glob("*.cu"), *operators, HERE / "emulator.cpp"])
    read = sorted([*ROOT.glob("csrc/*/*.[ch]*"), *HERE.glob("*.[ch]*"), Path(__file__)])
    digest = hashlib.sha256(torch.__version__.encode())
    for path in read:
        digest.update(path.read_bytes())
    library = CACHE / f"{digest.hexdigest()[:16]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        objects = [CACHE / f"{source.name}.{os.getpid()}.o" for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_compile, sources, objects))
        unfinished = library.with_suffix(f".{os.getpid()}")
        torch_directory = Path(torch.__file__).parent
        _run(["g++", "-shared", *map(str, objects), "-o", str(unfinished), *library_flags(torch_directory)])
        unfinished.replace(library)
        for one in objects:
            one.unlink()
    return library


def _compile(source: Path, target: Path) -> None:
    torch_directory = Path(torch.__file__).parent
    _run([
        *("g++", "-x", "c++", "-O1", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),
        # As on a GPU, a pack at an address that is not a multiple of its size ends the process.
        *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
        STANDARD, *TORCH_FLAGS, "-DMEGATRAIN_DISPATCH_KEY=CPU",
        f"-I{HERE}", *include_flags(torch_directory, is_system=True),
        "-c", str(source), "-o", str(target),
    ])  # fmt: skip


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
