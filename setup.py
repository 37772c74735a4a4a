"""What pyproject.toml cannot say: which packages belong to the distribution, and what is compiled.

Nothing compiled is needed: where there is no compiler, installing goes on without it, and `megatrain doctor` says so.

MEGATRAIN_CUDA=0 leaves the CUDA kernels out, =1 makes it an error when they cannot be built. Else they are built where
they can be used: where this environment has a torch that is built for CUDA, and the machine has nvcc.
TORCH_CUDA_ARCH_LIST names the GPUs to build for.
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
    # results have the same bits on every processor: no sum or product may be rounded in another way; vectors are passed
    # between inlined functions only, so that their ABI (psabi) does not matter
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
    """Leaves the kernels to csrc/build.py, all else to setuptools."""

    def build_extension(self, ext: Extension) -> None:
        if ext is not KERNELS:
            super().build_extension(ext)
            return
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, str(BUILD_KERNELS), "--output", str(output)], check=False)
        if done.returncode:
            raise CompileError(
                "the CUDA kernels were not built"
            )  # which ends an installation under MEGATRAIN_CUDA=1 only


def extensions() -> list[Extension]:
    """Return what is compiled here."""
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
