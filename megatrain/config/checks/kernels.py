"""Rules of [kernels], and of backends that run on GPUs only."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.config import Config
from megatrain.config.problem import Problem
from megatrain.config.wording import value_text


def kernel_problems(context: Context) -> Iterator[Problem]:
    """Yield what the kernels that are asked for do not compute."""
    config = context.config
    if config.kernels.norm != "apex":
        return
    yield from gpu_only_problems(config, "kernels.norm", "megatrain")
    if config.model.norm == "layernorm" and config.train.precision == "fp64":
        yield Problem(
            ("kernels.norm", "model.norm", "train.precision"),
            'kernels.norm="apex" has no backward of model.norm="layernorm" for train.precision="fp64"; '
            'use kernels.norm="megatrain" or precision="fp32"',
        )


def gpu_only_problems(config: Config, key: str, instead: str) -> Iterator[Problem]:
    """Yield that what `key` names runs on GPUs only, where the run is on processors; `instead` runs there."""
    section, _, name = key.partition(".")
    if config.runtime.device == "cpu":
        value = getattr(getattr(config, section), name)
        yield Problem(
            (key, "runtime.device"),
            f'{key}={value_text(value)} runs on GPUs only, and runtime.device="cpu"; '
            f"use {name}={value_text(instead)} or another device",
        )
