"""Checks that a worker's device supports what the configuration requires, before the worker builds anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError
from megatrain.ops.attention_choice import attention_case, choose_attention
from megatrain.ops.extension import Extension, missing_capability
from megatrain.ops.optional_backends import (
    FoundBackend,
    find_apex,
    find_transformer_engine,
    import_apex,
    import_transformer_engine,
)
from megatrain.parallel.graphed_chunk import STEPS_BEFORE_CAPTURE

FP8_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


@dataclass(frozen=True, slots=True)
class _NamedBackend:
    """A backend that the configuration names by the value `name` of [section] key."""

    section: str
    key: str
    name: str
    find: Callable[[], FoundBackend]
    load: Callable[[], Any]

    def __str__(self) -> str:
        return f'{self.section}.{self.key}="{self.name}"'

    def problem(self) -> str:
        """Import the backend; return why it cannot be used, or ""."""
        found = self.find()
        if found.problem:
            return f"{found.problem}: {found.hint}"
        try:
            self.load()
        except ImportError as error:
            return str(error)
        return ""


def _named_backends(config: Config) -> Iterator[_NamedBackend]:
    if config.kernels.norm == "apex":
        yield _NamedBackend("kernels", "norm", "apex", find_apex, import_apex)
    if config.fp8.backend == "transformer_engine":
        yield _NamedBackend("fp8", "backend", "transformer_engine", find_transformer_engine, import_transformer_engine)


def refuse_gpu_backends(config: Config) -> None:
    """Raise ConfigError if the configuration names a backend that needs a GPU, since this worker runs on a CPU."""
    problems = [
        f"{backend} runs on GPUs only, and torch sees none here; "
        f'use {backend.key}="megatrain", or see `megatrain doctor`'
        for backend in _named_backends(config)
    ]
    if problems:
        raise ConfigError(problems)


def kernel_note(config: Config, capability: tuple[int, int], extension: Extension) -> str:
    """Return a text for the log that names the kernels which a GPU of `capability` will run.

    Imports the backends that the configuration names, and no others.
    Raises: ConfigError when kernels are missing and kernels.strict, kernels.cuda_graphs or megatrain's FP8 needs them,
    when the kernels were built for other GPUs, when no allowed attention kernel can run this model, when the GPU lacks
    the FP8 that fp8.recipe needs, or when a named backend is not installed, is another package or cannot be imported.
    """
    backends = tuple(_named_backends(config))
    problems = [
        f'{backend}: {problem}; or use {backend.key}="megatrain"'
        for backend in backends
        if (problem := backend.problem())
    ]
    if extension.is_active:
        unfit = missing_capability(extension.architectures, capability)
        if unfit:
            problems.append(unfit)
    elif config.kernels.strict:
        problems.append(
            f"kernels.strict=true and there are no compiled kernels: {extension.reason}; see `megatrain doctor`"
        )
    elif config.kernels.cuda_graphs:
        problems.append(
            f"kernels.cuda_graphs=true and there are no compiled kernels ({extension.reason}): operations in plain "
            f"PyTorch form do not support capture; see `megatrain doctor`, or use cuda_graphs=false"
        )
    if config.fp8.is_used and config.fp8.backend == "megatrain" and not extension.is_active:
        problems.append(
            f'fp8.recipe="{config.fp8.recipe}" and there are no compiled kernels: {extension.reason}; without '
            f'them an FP8 GEMM takes thousands of kernel launches; use recipe="none", or see `megatrain doctor`'
        )
    try:
        if config.model.is_own("attention"):
            case = attention_case(config, "cuda", capability)
            choose_attention(case, config.kernels.attention, is_strict=config.kernels.strict)
    except ConfigError as error:
        problems += error.problems
    needed = FP8_CAPABILITY.get(config.fp8.recipe, (0, 0))
    if capability < needed:
        wanted, found = (f"{major}.{minor}" for major, minor in (needed, capability))
        problems.append(
            f'fp8.recipe="{config.fp8.recipe}" needs a GPU of compute capability {wanted}, and this one has {found}; '
            f'use recipe="none"'
        )
    if problems:
        raise ConfigError(problems)
    if extension.is_active:
        note = f"compiled kernels for {', '.join(extension.architectures)}"
    else:
        slower = "megatrain's operations run in plain PyTorch form, which is slower"
        note = f"no compiled kernels ({extension.reason}): {slower}"
    notes = [
        note,
        *(f"{backend.section}.{backend.key} by {backend.name} {backend.find().version}" for backend in backends),
    ]
    if config.kernels.cuda_graphs:
        notes.append(f"micro-batches are replayed from CUDA graphs after {STEPS_BEFORE_CAPTURE} steps")
    return "; ".join(notes)


def processor_notes(config: Config) -> list[str]:
    """Return the notes for the log about settings for GPUs that have no effect on a CPU."""
    notes = []
    if config.kernels.cuda_graphs:
        notes.append("kernels.cuda_graphs=true has no effect on CPUs")
    if config.kernels.strict:
        notes.append("kernels.strict=true has no effect on CPUs: it is about slow paths on GPUs")
    if config.kernels.attention != "auto":
        notes.append(
            f'kernels.attention="{config.kernels.attention}" has no effect on CPUs: attention has its own kernel there'
        )
    if config.parallel.offload_layers:
        notes.append("parallel.offload_layers saves nothing without a GPU: all activations are in host memory")
    return notes


def whole_sequence_notes(config: Config) -> list[str]:
    """Return the note for the log about layers to which parallel.num_sequence_chunks does not apply, if any."""
    layers = [layer for layer in range(config.model.num_layers) if config.fp8.covers(layer)]
    num_chunks = config.parallel.num_sequence_chunks
    if num_chunks == 1 or not layers:
        return []
    counted = f"{len(layers)} of {config.model.num_layers} layers exchange all rows at once"
    return [f"parallel.num_sequence_chunks={num_chunks}: {counted}: they multiply in FP8, which needs whole inputs"]
