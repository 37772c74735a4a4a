"""nvcc compiles the kernels for every GPU that we name, and the extension works with any torch.

`make test-torch-cuda` runs these tests with a torch that is built for CUDA, too.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from csrc.build import (
    ARCHITECTURES,
    KERNELS,
    OPTIMIZED,
    KernelBuildError,
    architecture_list,
    build,
    check_same_toolkit,
    find_nvcc,
    kernel_flags,
)
from tests.helpers.require import require

pytestmark = pytest.mark.timeout(900)
require(
    "nvcc", find_nvcc() is not None, "the package nvidia-cuda-nvcc (extra `dev`) or a CUDA toolkit compiles kernels"
)

COMPILES_FAST = ("-O0", "-Ofc=max")
"""Kernels that only have to compile and load need no optimization, which takes half of the time of a build."""
LOAD = """
import importlib, json, pkgutil, sys
import torch
import megatrain
megatrain.__path__.insert(0, sys.argv[1])  # before the operators load the extension, once
import megatrain.ops
for found in pkgutil.iter_modules(megatrain.ops.__path__):
    importlib.import_module(f"megatrain.ops.{found.name}")
from megatrain.ops.extension import load_extension
from megatrain.ops.library import declared_operators
kernels = importlib.import_module("megatrain._C")
print(json.dumps({
    "architectures": kernels.architectures,
    "has_current_stream": bool(kernels.has_current_stream),
    "reason": load_extension().reason,
    "has_kernel": {
        name: torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in declared_operators()
    },
}))
"""


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension, built as setup.py builds it except for the optimization."""
    output = tmp_path_factory.mktemp("extension") / "_C.abi3.so"
    build(output, ARCHITECTURES, jobs=2, optimization=COMPILES_FAST)
    return output


@pytest.fixture(scope="module")
def loaded(extension: Path) -> dict[str, Any]:
    """The output of a process that loads the extension."""
    command = [sys.executable, "-c", LOAD, str(extension.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_operator_gets_its_kernel(loaded: dict[str, Any]) -> None:
    assert loaded["architectures"] == ";".join(ARCHITECTURES)
    assert loaded["has_kernel"]
    assert [name for name, has_kernel in loaded["has_kernel"].items() if not has_kernel] == []


def test_kernels_find_the_current_stream_of_a_torch_for_cuda(loaded: dict[str, Any]) -> None:
    is_for_cuda = torch.version.cuda is not None

    assert loaded["has_current_stream"] is is_for_cuda
    assert loaded["reason"] == ("" if is_for_cuda else "this torch is built without CUDA")


def test_libtorch_is_a_dependency_of_the_extension(extension: Path) -> None:
    require("compiler", shutil.which("readelf") is not None, "readelf, which comes with g++, lists the dependencies")
    listed = subprocess.run(["readelf", "--dynamic", extension], capture_output=True, text=True, check=True).stdout

    assert "libtorch.so" in re.findall(r"\(NEEDED\).*\[(.*)\]", listed)


def test_code_for_every_architecture_is_inside(extension: Path) -> None:
    # The names of the targets are text in the fat binary's section.
    found = set(re.findall(rb"sm_\d+a?", extension.read_bytes()))

    assert {f"sm_{one.replace('.', '')}".encode() for one in ARCHITECTURES} <= found


def test_nvcc_compiles_a_kernel(tmp_path: Path) -> None:
    nvcc = find_nvcc()
    assert nvcc is not None
    target = tmp_path / "square_sum.o"
    command = [nvcc, *kernel_flags(["9.0a"]), *OPTIMIZED, "-c", KERNELS / "square_sum.cu", "-o", target]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert b"sm_90a" in target.read_bytes()


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match="nvcc failed"):
        build(tmp_path / "_C.abi3.so", ["1.0"], jobs=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["90", "Hopper", "8.0;sm_90", "9.0b"])
def test_unknown_architecture_is_refused(text: str) -> None:
    with pytest.raises(KernelBuildError, match=r"TORCH_CUDA_ARCH_LIST: '\w+(\.\w+)?' is no compute capability"):
        architecture_list(text)


def test_nvcc_of_another_major_version_than_torch_is_refused() -> None:
    answer = "Cuda compilation tools, release 13.0, V13.0.48"
    for torch_cuda in (None, "13.0", "13.2"):
        check_same_toolkit(answer, torch_cuda)
    with pytest.raises(
        KernelBuildError, match=r"nvcc is of CUDA 13\.0 and torch of CUDA 12\.8: .* an nvcc of CUDA 12 first"
    ):
        check_same_toolkit(answer, "12.8")


@pytest.mark.parametrize("text", ["8.0;9.0a", "8.0 9.0a", "8.0, 9.0a", ""])
def test_architectures_as_torch_lists_them(text: str) -> None:
    assert architecture_list(text) == ARCHITECTURES
