"""The packages of the distribution and its compiled extensions, which pyproject.toml cannot list.

Without a compiler, the installation continues without the extensions, and `megatrain doctor` reports which are missing.

MEGATRAIN_CUDA=0 leaves out the CUDA kernels; with =1 it is an error if they cannot be built. If the variable is not
set, they are built if this environment has a torch that is built for CUDA and the machine has nvcc.
TORCH_CUDA_ARCH_LIST selects the GPUs to build for.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HOST_COPY = Extension(
    "megatrain._host_copy",
    ["csrc/host_copy/stream_copy.c"],
    extra_compile_args=["-O2"],
    optional=True,
)
HOST_KERNELS = Extension(
    "megatrain._host_kernels",
    [f"csrc/host_kernels/{name}.c" for name in ("optimizer_step", "rms_norm", "rotary", "square_sum", "swiglu")],
    depends=[f"csrc/host_kernels/{name}.h" for name in ("argument", "host", "optimizer_loop")],
    # results have the same bits on every processor, so the compiler may not change the rounding of a sum or product;
    # vectors are passed only between inlined functions, so their ABI (psabi) does not matter
    extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-Wno-psabi"],
    extra_link_args=["-pthread"],
    libraries=["m", "dl"],
    optional=True,
)
KERNELS = Extension("megatrain._C", ["csrc/operators/module.cpp"], py_limited_api=True)
BUILD_KERNELS = Path(__file__).resolve().parent / "csrc" / "build.py"

PACKAGES = [
    *find_packages(include=["megatrain", "megatrain.*"]),
    *find_packages("launcher", include=["megatrain_job", "megatrain_job.*"]),
    *find_packages("launcher", include=["megatrain_launcher", "megatrain_launcher.*"]),
    *find_packages("diagnostics", include=["megatrain_diagnostics", "megatrain_diagnostics.*"]),
    *find_packages("diagnostics", include=["megatrain_dashboard", "megatrain_dashboard.*"]),
]


class BuildExtensions(build_ext):
    """Builds the CUDA kernels with csrc/build.py, and all other extensions with setuptools."""

    def build_extension(self, ext: Extension) -> None:
        if ext is not KERNELS:
            super().build_extension(ext)
            return
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, str(BUILD_KERNELS), "--output", str(output)], check=False)
        if done.returncode:
            # this ends the installation only if MEGATRAIN_CUDA=1, because otherwise the extension is optional
            raise CompileError("the CUDA kernels were not built")


def extensions() -> list[Extension]:
    """Return the extensions to build here."""
    wanted = os.environ.get("MEGATRAIN_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"MEGATRAIN_CUDA must be 0 or 1, got {wanted!r}")
    build = runpy.run_path(str(BUILD_KERNELS))
    can_be_used = build["find_nvcc"]() is not None and build["is_torch_for_cuda"]()
    KERNELS.optional = wanted != "1"
    has_kernels = wanted == "1" or (wanted == "" and can_be_used)
    return [HOST_COPY, HOST_KERNELS, *([KERNELS] if has_kernels else [])]


setup(
    packages=PACKAGES,
    package_dir={
        "megatrain_job": "launcher/megatrain_job",
        "megatrain_launcher": "launcher/megatrain_launcher",
        "megatrain_diagnostics": "diagnostics/megatrain_diagnostics",
        "megatrain_dashboard": "diagnostics/megatrain_dashboard",
    },
    package_data={
        "megatrain": ["py.typed", "*.pyi"],
        "megatrain_launcher": ["templates/*"],
        "megatrain_dashboard": ["static/*", "static/assets/*", "runbooks/*.md"],
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtensions},
)
