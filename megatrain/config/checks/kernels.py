"""Rules of [kernels], and of backends that run on GPUs only."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.config import Config
from megatrain.config.problem import Problem
from megatrain.config.toml_text import setting, value_text

_BACKWARD_FOLLOWS = "a backward must follow its forward"


def kernels_problems(context: Context) -> Iterator[Problem]:
    """Yield what the requested kernels do not compute, and what cannot be captured as CUDA graphs."""
    if context.config.kernels.norm == "apex":
        yield from _apex_problems(context.config)
    if context.config.kernels.cuda_graphs:
        yield from _capture_problems(context.config)


def _apex_problems(config: Config) -> Iterator[Problem]:
    yield from gpu_only_problems(config, "kernels.norm")
    if config.model.norm == "rmsnorm_zero_centered":
        yield Problem(
            ("kernels.norm", "model.norm"),
            'kernels.norm="apex" has no model.norm="rmsnorm_zero_centered"; use kernels.norm="megatrain"',
        )
    if config.model.norm == "layernorm" and config.train.precision == "fp64":
        yield Problem(
            ("kernels.norm", "model.norm", "train.precision"),
            'kernels.norm="apex" has no backward of model.norm="layernorm" for train.precision="fp64"; '
            'use kernels.norm="megatrain" or precision="fp32"',
        )


def _capture_problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    rules: list[tuple[str, object, object, str]] = [
        ("parallel.tp_size", parallel.tp_size, 1, "the collectives of tensor parallelism cannot be captured"),
        ("parallel.pp_size", parallel.pp_size, 1, _BACKWARD_FOLLOWS),
        ("parallel.zero_stage", parallel.zero_stage, 1, "ZeRO-2 sums each micro-batch in different memory"),
        ("parallel.offload_layers", parallel.offload_layers, 0, "copies to host memory cannot be captured"),
        ("data.has_document_mask", config.data.has_document_mask, False, "each micro-batch has different documents"),
    ]
    if parallel.pp_size == 1:
        rules.append(("parallel.schedule", parallel.schedule, "1f1b", _BACKWARD_FOLLOWS))
    for key, found, needed, reason in rules:
        if found != needed:
            yield Problem(
                ("kernels.cuda_graphs", key),
                f"kernels.cuda_graphs=true cannot be combined with {setting(key, found)}: {reason}; "
                f"use {setting(key.partition('.')[2], needed)} or cuda_graphs=false",
            )


def gpu_only_problems(config: Config, key: str) -> Iterator[Problem]:
    """Yield a problem if the run is on CPUs. The value of `key` runs on GPUs only; "megatrain" runs on CPUs, too."""
    section, _, name = key.partition(".")
    if config.runtime.device == "cpu":
        value = getattr(getattr(config, section), name)
        yield Problem(
            (key, "runtime.device"),
            f'{key}={value_text(value)} runs on GPUs only, and runtime.device="cpu"; '
            f'use {name}="megatrain" or another device',
        )
