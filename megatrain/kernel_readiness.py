"""Whether the GPU that a worker was given runs what its configuration asks for. Asked before anything is built."""

from __future__ import annotations

from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError
from megatrain.ops.extension import Extension, missing_capability

FP8_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def kernel_note(config: Config, capability: tuple[int, int], extension: Extension) -> str:
    """Return which kernels a GPU of `capability` will run, in words for the log.

    Raises: ConfigError where kernels are missing and kernels.strict is set, where those that were built are for other
    GPUs, or where the GPU has no FP8.
    """
    problems = []
    if extension.is_active:
        unfit = missing_capability(extension.architectures, capability)
        if unfit:
            problems.append(unfit)
    elif config.kernels.strict:
        problems.append(
            f"kernels.strict=true and there are no compiled kernels: {extension.reason}; see `megatrain doctor`"
        )
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
        return f"compiled kernels for {', '.join(extension.architectures)}"
    return f"no compiled kernels ({extension.reason}): every operation in its plain PyTorch form, which is slower"
