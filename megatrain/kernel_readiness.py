"""Whether the device that a worker was given runs what its configuration asks for. Asked before anything is built."""

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
from megatrain.parallel.graphed_chunk import STEPS_BEFORE_RECORDING

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
        """Import it; return why it cannot be used, or ""."""
        found = self.find()
        if found.problem:
            return f"{found.problem}: {found.way_out}"
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
    """Raise ConfigError where the configuration names what runs on GPUs only: this worker is on a processor."""
    problems = [
        f'{one} runs on GPUs only, and torch sees none here; use {one.key}="megatrain", or see `megatrain doctor`'
        for one in _named_backends(config)
    ]
    if problems:
        raise ConfigError(problems)


def kernel_note(config: Config, capability: tuple[int, int], extension: Extension) -> str:
    """Return which kernels a GPU of `capability` will run, in words for the log.

    Imports the backends that the configuration names, and no others.
    Raises: ConfigError where kernels are missing and kernels.strict or kernels.cuda_graphs is set, where those that
    were built are for other GPUs, where the GPU has no FP8, or where a named backend is not installed, is another
    package or does not load.
    """
    backends = tuple(_named_backends(config))
    problems = [f'{one}: {problem}; or use {one.key}="megatrain"' for one in backends if (problem := one.problem())]
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
            f"kernels.cuda_graphs=true and there are no compiled kernels ({extension.reason}): operations in their "
            f"plain PyTorch form were not made to be recorded; see `megatrain doctor`, or use cuda_graphs=false"
        )
    if config.fp8.is_used and config.fp8.backend == "megatrain" and not extension.is_active:
        problems.append(
            f'fp8.recipe="{config.fp8.recipe}" and there are no compiled kernels: {extension.reason}; their plain form '
            f'takes thousands of launches a product; use recipe="none", or see `megatrain doctor`'
        )
    try:
        case = attention_case(config, "cuda", capability)
        choose_attention(case, config.kernels.attention, is_strict=config.kernels.strict)
    except ConfigError as error:
        problems += error.problems
    needed = FP8_CAPABILITY.get(config.fp8.recipe, (0, 0))
    if capability < needed:
        wanted, found = (f"{major}.{minor}" for major, minor in (needed, capability))
        problems.append(
            f'fp8.recipe="{config.fp8.recipe}" needs a GPU of compute capability {wanted}, this one has {found}; '
            f'use recipe="none"'
        )
    if problems:
        raise ConfigError(problems)
    if extension.is_active:
        note = f"compiled kernels for {', '.join(extension.architectures)}"
    else:
        note = f"no compiled kernels ({extension.reason}): every operation in its plain PyTorch form, which is slower"
    notes = [note, *(f"{one.section}.{one.key} by {one.name} {one.find().version}" for one in backends)]
    if config.kernels.cuda_graphs:
        notes.append(f"micro-batches are replayed from CUDA graphs after {STEPS_BEFORE_RECORDING} steps")
    return "; ".join(notes)


def processor_notes(config: Config) -> list[str]:
    """Return what is to be said of a configuration for GPUs that runs on a processor, in words for the log."""
    notes = []
    if config.kernels.cuda_graphs:
        notes.append("kernels.cuda_graphs=true: a processor has nothing to replay")
    if config.kernels.strict:
        notes.append("kernels.strict=true: a processor has one form of everything")
    if config.kernels.attention != "auto":
        notes.append(f'kernels.attention="{config.kernels.attention}": a processor has its own kernel')
    if config.parallel.offload_layers:
        notes.append("parallel.offload_layers saves nothing without a GPU: host memory is all there is")
    return notes


def whole_sequence_notes(config: Config) -> list[str]:
    """Return which layers do not do what parallel.num_sequence_chunks says, in words for the log."""
    layers = [layer for layer in range(config.model.num_layers) if config.fp8.covers(layer)]
    num_chunks = config.parallel.num_sequence_chunks
    if num_chunks == 1 or not layers:
        return []
    counted = f"{len(layers)} of {config.model.num_layers} layers exchange all rows at once"
    return [f"parallel.num_sequence_chunks={num_chunks}: {counted}: they multiply in FP8, which takes whole inputs"]
