"""Chooses the first attention kernel of a table that supports a case, and gives the reasons against earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch

from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError
from megatrain.ops.precision import DTYPES

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """The kind of device that kernels are chosen for: the device of the tensors, or the device of a plan.

    `capability` is (0, 0) if the device is not a GPU.
    """

    type: str
    capability: tuple[int, int] = (0, 0)


@cache
def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device of this machine."""
    if device.type != "cuda":
        return DeviceKind(device.type)
    return DeviceKind("cuda", torch.cuda.get_device_capability(device))


class Backend(StrEnum):
    """Implementations of attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    CPU = "cpu"
    BLOCKS = "blocks"
    """Writes out the scores of one block of queries at a time (capped_attention.py)."""
    DENSE = "dense"
    """Writes out the scores of all S * S pairs, or a mask of that size."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """All properties that the choice depends on. capability: (0, 0) if the device is not a GPU."""

    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    has_window: bool
    has_documents: bool
    refused_by_torch: frozenset[Backend] = frozenset()
    """Backends that the installed torch rejects for reasons that the table does not check."""
    has_softcap: bool = False


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The first backend of the table that supports the case, and why the backends above it do not."""

    backend: Backend
    reason: str
    is_fallback: bool
    """Whether this is a slow path on a GPU: attention without a fused kernel."""


def attention_case(config: Config, device_type: str, capability: tuple[int, int]) -> AttentionCase:
    """Return the case of a configuration's model, as far as it is known before tensors exist."""
    return AttentionCase(
        device_type,
        capability,
        DTYPES[config.train.precision],
        config.model.resolved_head_dim,
        config.model.has_window,
        config.data.has_document_mask,
        has_softcap=config.model.attention_softcap > 0,
    )


def choose_attention(case: AttentionCase, wanted: str = "auto", *, is_strict: bool = False) -> AttentionChoice:
    """Return the best backend for `case`; on a GPU, return the `wanted` one unless that is "auto".

    Raises: ConfigError when `wanted` does not support the case, or when is_strict is set and only a slow backend does.
    """
    if case.device_type != "cuda":
        wanted = "auto"
    refusals: list[str] = []
    for backend, refuses in _TABLE:
        refusal = refuses(case) or ("this torch does not support it" if backend in case.refused_by_torch else "")
        if wanted not in ("auto", backend):
            continue
        if not refusal:
            is_fallback = backend in (Backend.BLOCKS, Backend.DENSE) and case.device_type == "cuda"
            reason = "; ".join(refusals)
            if is_fallback and is_strict:
                which = "all S * S scores" if backend is Backend.DENSE else "the scores of a block of queries"
                why = reason or f'kernels.attention="{wanted}"'
                problem = f"kernels.strict=true, and attention would write out {which}: {why}"
                raise ConfigError([f"{problem}; use kernels.strict=false, or a model or GPU that has a kernel"])
            return AttentionChoice(backend, reason, is_fallback)
        if backend not in (Backend.CPU, Backend.BLOCKS):  # these two are not expected on a GPU or without a soft cap
            refusals.append(f"not {backend}: {refusal}")
    reasons = "; ".join(refusals)
    raise ConfigError(
        [f'kernels.attention="{wanted}" does not support this model: {reasons}; use kernels.attention="auto"']
    )


def _cudnn(case: AttentionCase) -> str:
    return (
        _needs_gpu(case, (9, 0))
        or _needs_no_softcap(case)
        or _needs_half(case)
        or _needs_head_dim(case, 128)
        or ("it has no kernel for a sliding window" if case.has_window else "")
        or ("torch cannot pass document boundaries to it" if case.has_documents else "")
    )


def _flash(case: AttentionCase) -> str:
    return _needs_gpu(case, (8, 0)) or _needs_no_softcap(case) or _needs_half(case) or _needs_head_dim(case, 256)


def _efficient(case: AttentionCase) -> str:
    return (
        _needs_gpu(case, (7, 0))
        or _needs_no_softcap(case)
        or (f"it has no kernel for {case.dtype}" if case.dtype == torch.float64 else "")
        or ("it needs a full mask for a window" if case.has_window else "")
        or ("it needs a full mask for documents" if case.has_documents else "")
    )


def _cpu(case: AttentionCase) -> str:
    return _needs_no_softcap(case) or ("" if case.device_type == "cpu" else f"the device is {case.device_type}")


def _blocks(case: AttentionCase) -> str:
    return "" if case.has_softcap else "it is for soft caps"


def _dense(case: AttentionCase) -> str:
    return _needs_no_softcap(case)


def _needs_no_softcap(case: AttentionCase) -> str:
    return "it does not support a soft cap" if case.has_softcap else ""


def _needs_gpu(case: AttentionCase, capability: tuple[int, int]) -> str:
    if case.device_type != "cuda":
        return f"the device is {case.device_type}"
    if case.capability < capability:
        needed, found = (f"{major}.{minor}" for major, minor in (capability, case.capability))
        return f"it needs compute capability {needed}, and the GPU has {found}"
    return ""


def _needs_half(case: AttentionCase) -> str:
    return "" if case.dtype in _HALF else f"it needs bf16 or fp16, not {case.dtype}"


def _needs_head_dim(case: AttentionCase, largest: int) -> str:
    is_fit = case.head_dim <= largest and case.head_dim % 8 == 0
    return "" if is_fit else f"it needs a head dim that is a multiple of 8 up to {largest}, not {case.head_dim}"


_TABLE: tuple[tuple[Backend, Callable[[AttentionCase], str]], ...] = (
    (Backend.CUDNN, _cudnn),
    (Backend.FLASH, _flash),
    (Backend.EFFICIENT, _efficient),
    (Backend.CPU, _cpu),
    (Backend.BLOCKS, _blocks),
    (Backend.DENSE, _dense),
)
