"""Build megatrain._C, the kernels for CUDA, with nvcc: `python csrc/build.py --output megatrain/_C.abi3.so`.

It needs torch's headers, Python's headers and CUDA toolkit 12 or later, but neither a GPU nor a torch that is built for
CUDA. The extension is built against torch's stable ABI with 2.11 as its target and against Python's limited API, so
that one file works with every torch from 2.11 and every Python from 3.11. This file uses only the standard library,
because setup.py runs it where nothing else is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCHITECTURES = ("8.0", "9.0a")
TARGET_TORCH = "0x020b000000000000ULL"
TARGET_PYTHON = "0x030b0000"
KERNELS = Path(__file__).resolve().parent / "kernels"
OPERATORS = Path(__file__).resolve().parent / "operators"
OPTIMIZED = ("-O3",)
"""Flags for an extension that is used: all optimizations of host and device code."""
STANDARD = "-std=c++20"
HOST_FLAGS = (STANDARD, "-Xcompiler", "-fPIC,-fvisibility=hidden")
TORCH_FLAGS = (f"-DTORCH_TARGET_VERSION={TARGET_TORCH}", f"-DPy_LIMITED_API={TARGET_PYTHON}")


class KernelBuildError(Exception):
    """Nothing was built. The message is for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, or print why nothing can be built. Exit code 1 when nothing was built."""
    parser = argparse.ArgumentParser(description="Build megatrain._C.")
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    parser.add_argument(
        "--arch",
        default=os.environ.get("TORCH_CUDA_ARCH_LIST", ""),
        help=f"compute capabilities, such as '8.0;9.0a' (TORCH_CUDA_ARCH_LIST; default {';'.join(ARCHITECTURES)})",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parsed = parser.parse_args(arguments)
    try:
        build(parsed.output, architecture_list(parsed.arch), parsed.jobs)
    except KernelBuildError as error:
        print(f"csrc/build.py: {error}", file=sys.stderr)
        return 1
    return 0


def build(output: Path, architectures: Sequence[str], jobs: int, *, optimization: Sequence[str] = OPTIMIZED) -> None:
    """Compile the files of csrc/kernels and csrc/operators and link them to `output`, which is written atomically.

    jobs: compilers at a time. With at least twice as many jobs as kernels, a kernel is compiled for several
    architectures at a time.
    Raises: KernelBuildError where a prerequisite is missing or a compiler fails.
    """
    nvcc, torch = find_nvcc(), find_torch()
    if nvcc is None:
        raise KernelBuildError("no nvcc on PATH, in CUDA_HOME, in /usr/local/cuda or in the package nvidia-cuda-nvcc")
    if torch is None:
        raise KernelBuildError("torch is not installed in this environment: its headers are needed")
    check_same_toolkit(_run([str(nvcc), "--version"]).stdout, cuda_of_torch(torch))
    with tempfile.TemporaryDirectory() as directory:
        # the slowest files come first, so that the compilers end at about the same time: kernels before operators, and
        # large kernels before small ones
        kernels = sorted(KERNELS.glob("*.cu"), key=lambda source: source.stat().st_size, reverse=True)
        operators = sorted(OPERATORS.glob("*.cpp"))
        threads = f"--threads={max(1, jobs // len(kernels))}"
        of_kernels = [*kernel_flags(architectures), *optimization, threads]
        of_operators = [*operator_flags(torch, architectures), *optimization]
        sources = [*((one, of_kernels) for one in kernels), *((one, of_operators) for one in operators)]
        objects = [Path(directory) / f"{source.name}.o" for source, _ in sources]
        with ThreadPoolExecutor(jobs) as pool:
            commands = [
                [str(nvcc), *flags, "-c", str(source), "-o", str(target)]
                for (source, flags), target in zip(sources, objects, strict=True)
            ]
            for done in pool.map(_run, commands):
                if done.returncode:
                    raise KernelBuildError(f"nvcc failed: {' '.join(done.args)}\n{done.stderr}")
        unfinished = output.with_name(f".{output.name}.{os.getpid()}")
        try:
            done = _run([str(nvcc), *link_flags(nvcc, torch), *map(str, objects), "-o", str(unfinished)])
            if done.returncode:
                raise KernelBuildError(f"linking failed: {' '.join(done.args)}\n{done.stderr}")
            unfinished.replace(output)
        finally:
            unfinished.unlink(missing_ok=True)


def architecture_list(text: str) -> tuple[str, ...]:
    """Return the compute capabilities of a list in the form of TORCH_CUDA_ARCH_LIST: '8.0;9.0a' or '8.0 9.0a'.

    Raises: KernelBuildError for an entry that is not a compute capability.
    """
    found = tuple(text.replace(";", " ").replace(",", " ").split()) or ARCHITECTURES
    for one in found:
        if re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", one) is None:
            raise KernelBuildError(
                f"TORCH_CUDA_ARCH_LIST: {one!r} is no compute capability, such as 8.0, 9.0a or 9.0+PTX"
            )
    return found


def kernel_flags(architectures: Sequence[str]) -> list[str]:
    """Return nvcc's flags for a file of csrc/kernels. They name no headers of torch, which kernels do not include."""
    capabilities = [one.removesuffix("+PTX").replace(".", "") for one in architectures]
    return [
        *HOST_FLAGS,
        *(f"-gencode=arch=compute_{one},code=sm_{one}" for one in capabilities),
        # on newer GPUs the driver compiles the PTX itself
        *(
            f"-gencode=arch=compute_{one},code=compute_{one}"
            for one, text in zip(capabilities, architectures, strict=True)
            if text.endswith("+PTX")
        ),
    ]


def operator_flags(torch: Path, architectures: Sequence[str]) -> list[str]:
    """Return nvcc's flags for a file of csrc/operators, which it gives to the host's compiler."""
    names = f'-DMEGATRAIN_ARCHITECTURES="{";".join(architectures)}"'
    return [*HOST_FLAGS, *TORCH_FLAGS, "-DUSE_CUDA", names, *include_flags(torch)]


def include_flags(torch: Path, *, is_system: bool = False) -> list[str]:
    """Return the include flags. is_system: the compiler does not warn about code in these headers."""
    option = "-isystem" if is_system else "-I"
    directories = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [f"{option}{directory}" for directory in directories]


def link_flags(nvcc: Path, torch: Path) -> list[str]:
    """Return nvcc's flags for the shared library. CUDA's runtime is linked statically: none is needed at load time.

    libtorch is kept as a dependency although the linker finds no symbol of it in use. In a torch for CUDA it loads
    libtorch_cuda, whose symbols torch itself makes visible only to its own libraries. Without this dependency, the weak
    function that returns the current stream would stay null.
    """
    library = f"-L{nvcc.parent.parent / 'lib'}"
    return ["-shared", "--cudart=static", library, "-Xlinker", "--no-as-needed", *library_flags(torch)]


def library_flags(torch: Path) -> list[str]:
    """Return the flags that link torch. Its stable C functions need no CUDA build of torch."""
    return [f"-L{torch}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]


def find_nvcc() -> Path | None:
    """Return nvcc from PATH, CUDA_HOME, NVIDIA's default directory or the package nvidia-cuda-nvcc, or None."""
    on_path = shutil.which("nvcc")
    candidates = [Path(on_path)] if on_path else []
    candidates += [Path(home) / "bin/nvcc" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    candidates += [found for site in site_packages() for found in sorted(site.glob("nvidia/cu*/bin/nvcc"))]
    return next((one for one in candidates if os.access(one, os.X_OK)), None)


def find_torch() -> Path | None:
    """Return the directory of the package torch in this Python's environment; None if it is not installed."""
    return next((site / "torch" for site in site_packages() if (site / "torch/include/torch").is_dir()), None)


def is_torch_for_cuda() -> bool:
    """Return whether the torch of this environment is built for CUDA."""
    torch = find_torch()
    return torch is not None and cuda_of_torch(torch) is not None


def cuda_of_torch(torch: Path) -> str | None:
    """Return the CUDA version that torch is built for, from its version file; None for a build without CUDA."""
    version = torch / "version.py"
    return runpy.run_path(str(version)).get("cuda") if version.exists() else None


def check_same_toolkit(nvcc_answer: str, torch_cuda: str | None) -> None:
    """Raise KernelBuildError where nvcc and torch have different major versions of CUDA.

    The driver fits torch but may be too old for the runtime that nvcc links. Then the kernels would load, and every
    launch would fail. A torch without CUDA passes the check: such a build only shows that the kernels compile.
    """
    release = re.search(r"release (\d+)\.\d+", nvcc_answer)
    if torch_cuda is None or release is None or release[1] == torch_cuda.partition(".")[0]:
        return
    raise KernelBuildError(
        f"nvcc is of CUDA {release[0].removeprefix('release ')} and torch of CUDA {torch_cuda}: the major versions "
        f"must be the same; put an nvcc of CUDA {torch_cuda.partition('.')[0]} first on PATH or in CUDA_HOME"
    )


def site_packages() -> Iterator[Path]:
    """Yield the directories of this environment's packages, even in an isolated build that hides them from imports."""
    seen = dict.fromkeys([*(sysconfig.get_paths()[key] for key in ("purelib", "platlib")), *sys.path])
    yield from (Path(one) for one in seen if one)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
