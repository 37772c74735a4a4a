"""Selects the implementation of the operators that the tests of megatrain.ops run on, by pytest's option --kernels.

reference: plain torch on the CPU. emulated: the kernels of csrc/ carried out by the processor. cuda: the kernels on a
GPU. All tests are the same; they get their tensors from this module.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from shutil import which

import pytest
import torch
from torch import Tensor

from tests.emulated_cuda.build import count_launches, load_emulated_kernels, set_thread_order
from tests.helpers.require import require


@dataclass(slots=True)
class KernelsUnderTest:
    """The choice of `use_kernels`."""

    kind: str = "reference"
    emulated: ctypes.CDLL | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.kind == "cuda" else "cpu")


UNDER_TEST = KernelsUnderTest()


def use_kernels(kind: str) -> None:
    """Choose the implementation for this process. It cannot be undone: kernels stay registered."""
    if kind == "emulated":
        require("compiler", which("g++") is not None, "g++ compiles the kernels for the processor")
        UNDER_TEST.emulated = load_emulated_kernels()
    if kind == "cuda":
        from megatrain.ops.extension import load_extension

        if load_extension().reason:
            pytest.exit(f"--kernels=cuda: {load_extension().reason}", returncode=4)
    UNDER_TEST.kind = kind


def thread_orders() -> list[int]:
    """Return the orders in which the threads of a block are run; results must not depend on the order."""
    return [0, 1, 7] if UNDER_TEST.kind == "emulated" else [0, 0]


def use_thread_order(order: int) -> None:
    """Run the threads of emulated blocks in `order` from now on; elsewhere the hardware decides."""
    if UNDER_TEST.emulated is not None:
        set_thread_order(UNDER_TEST.emulated, order)


def num_launches() -> int:
    """Return how many kernels this process has launched in the emulation; 0 elsewhere."""
    return count_launches(UNDER_TEST.emulated) if UNDER_TEST.emulated is not None else 0


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normal random numbers on the device under test: the same numbers for a seed on every device and in every
    dtype."""
    numbers = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (numbers * scale).to(UNDER_TEST.device, dtype)


def on_device(tensor: Tensor) -> Tensor:
    """Return `tensor` on the device under test."""
    return tensor.to(UNDER_TEST.device)
