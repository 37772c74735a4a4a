"""Loads compiled code: the CUDA kernels (megatrain._C) and functions in C. Gives the reason if there are no kernels."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

HostFunction = Callable[[Any], None]
"""A compiled function of csrc/host_kernels. It takes a pointer to the struct of its arguments."""


@dataclass(frozen=True, slots=True)
class Extension:
    """Whether the compiled kernels are active, for which compute capabilities, and if not, why."""

    architectures: tuple[str, ...]
    reason: str
    """Why the kernels are not active; empty if they are."""

    @property
    def is_active(self) -> bool:
        return not self.reason


@cache
def load_extension() -> Extension:
    """Load the kernels, once per process. Never raises: without kernels every operation uses its plain torch form."""
    if torch.version.cuda is None:
        return Extension((), "this torch is built without CUDA")
    try:
        module = importlib.import_module("megatrain._C")
    except ModuleNotFoundError:
        return Extension((), "megatrain._C was not built when megatrain was installed")
    except Exception as error:  # noqa: BLE001 - whatever the error is, every operation has a plain torch form
        return Extension((), f"megatrain._C does not load: {type(error).__name__}: {error}")
    if not getattr(module, "has_current_stream", False):
        return Extension((), "megatrain._C does not find torch's current stream: build it again with this torch")
    return Extension(tuple(module.architectures.split(";")), "")


def host_function(module: str, name: str, argument_types: Sequence[type]) -> Callable[..., None] | None:
    """Return a C function of the library that setup.py builds as `module`; None if this installation has none.

    argument_types: types of ctypes. Other Python threads run during a call. For a pointer to a struct, the library
    states the struct's size (csrc/host_kernels/argument.h): a function whose struct has another size is of another
    version, and is not returned.
    """
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return None
    pointed = [getattr(argument, "_type_", None) for argument in argument_types]
    sizes = [ctypes.sizeof(one) for one in pointed if isinstance(one, type) and issubclass(one, ctypes.Structure)]
    try:
        library = ctypes.CDLL(found.origin)
        function: Callable[..., None] = ctypes.CFUNCTYPE(None, *argument_types)((name, library))
        is_of_this_version = all(ctypes.c_int64.in_dll(library, f"{name}_size").value == size for size in sizes)
    except (OSError, AttributeError, ValueError):
        return None  # compiled for another machine, or of another version
    return function if is_of_this_version else None


def host_kernel(name: str, argument: type[ctypes.Structure]) -> HostFunction | None:
    """Return a function of csrc/host_kernels, which takes a pointer to `argument`; None under the conditions of
    host_function.
    """
    return host_function("megatrain._host_kernels", f"megatrain_{name}", [ctypes.POINTER(argument)])


def missing_capability(architectures: tuple[str, ...], capability: tuple[int, int]) -> str:
    """Return why a GPU of `capability` cannot run code built for `architectures`, or "" if it can.

    Code for 8.0 runs on every 8.x. Code for a family, such as 10.0f, runs on every 10.x. Code for 9.0a, and its PTX,
    runs only on 9.0. PTX for a capability without a letter runs on every later one.
    """
    for architecture in architectures:
        found = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", architecture)
        if found is None:
            continue
        built, is_exact = (int(found[1]), int(found[2])), found[3] == "a"
        is_later_minor = capability[0] == built[0] and capability[1] > built[1]
        is_later = found[4] is not None and found[3] == "" and capability > built
        if capability == built or (not is_exact and is_later_minor) or is_later:
            return ""
    wanted = f"{capability[0]}.{capability[1]}"
    return (
        f"megatrain._C is built for compute capability {', '.join(architectures)}; this GPU has {wanted}: "
        f"install megatrain again with TORCH_CUDA_ARCH_LIST={wanted}"
    )
