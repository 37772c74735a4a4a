"""Rules of matrix multiplications in 8-bit floating point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.checks.kernels import gpu_only_problems
from megatrain.config.config import Config
from megatrain.config.fp8 import DIM_MULTIPLE
from megatrain.config.problem import Problem, multiples_around, unused_problems
from megatrain.formatting import alternatives


def fp8_problems(context: Context) -> Iterator[Problem]:
    """Yield what cannot be multiplied in 8 bits, and keys without an effect."""
    config = context.config
    fp8 = config.fp8
    if not fp8.is_used:
        for name in ("scaling", "history_len", "backend", "skip_layers"):
            yield from unused_problems("fp8", fp8, name, "recipe", "tensorwise")
        return
    if fp8.scaling == "delayed" and fp8.recipe == "rowwise":
        yield Problem(
            ("fp8.scaling", "fp8.recipe"),
            'fp8.scaling="delayed" needs one scale for each tensor, but fp8.recipe="rowwise" has one for each row; '
            'use scaling="current" or recipe="tensorwise"',
        )
    if fp8.scaling != "delayed":
        yield from unused_problems("fp8", fp8, "history_len", "scaling", "delayed")
    if fp8.backend == "transformer_engine":
        yield from _transformer_engine_problems(config)
    if config.train.precision != "bf16":
        yield Problem(
            ("fp8.recipe", "train.precision"),
            f'fp8.recipe="{fp8.recipe}" needs train.precision="bf16", not "{config.train.precision}"; '
            f'use that precision or recipe="none"',
        )
    for layer, count in Counter(fp8.skip_layers).items():
        if count > 1:
            yield Problem(("fp8.skip_layers",), f"fp8.skip_layers names layer {layer} {count} times; name it once")
    if set(fp8.skip_layers) >= set(range(config.model.num_layers)):
        yield Problem(
            ("fp8.skip_layers", "fp8.recipe"),
            f'fp8.skip_layers names all {config.model.num_layers} layers, so fp8.recipe="{fp8.recipe}" does nothing; '
            f'use recipe="none" or name fewer',
        )
    beyond = [layer for layer in fp8.skip_layers if layer >= config.model.num_layers]
    if beyond:
        yield Problem(
            ("fp8.skip_layers", "model.num_layers"),
            f"fp8.skip_layers names layer {beyond[0]}, but with model.num_layers={config.model.num_layers} the last "
            f"layer is {config.model.num_layers - 1}; remove the layer",
        )
    yield from _dim_problems(config)


def _transformer_engine_problems(config: Config) -> Iterator[Problem]:
    fp8, named = config.fp8, 'fp8.backend="transformer_engine"'
    if fp8.recipe == "rowwise":
        yield Problem(
            ("fp8.recipe", "fp8.backend"),
            f'fp8.recipe="rowwise" is not available with {named}, which scales by tensor or by block; '
            f'use recipe="tensorwise" or backend="megatrain"',
        )
    elif fp8.scaling == "delayed":
        yield Problem(
            ("fp8.scaling", "fp8.backend"),
            f'fp8.scaling="delayed" with {named} would keep histories in its own modules, which checkpoints do not '
            f'contain; use scaling="current" or backend="megatrain"',
        )
    yield from gpu_only_problems(config, "fp8.backend")


def _dim_problems(config: Config) -> Iterator[Problem]:
    model, tp_size = config.model, config.parallel.tp_size
    heads = ("model.num_heads", "model.hidden_size", "model.head_dim")
    sizes = (
        ("hidden size", model.hidden_size, ("model.hidden_size",)),
        ("width of all query heads / tp_size", model.num_heads * model.resolved_head_dim // tp_size, heads),
        (
            "width of key heads on a rank",
            max(model.resolved_num_kv_heads // tp_size, 1) * model.resolved_head_dim,
            ("model.num_kv_heads", *heads),
        ),
        ("ffn size / tp_size", model.resolved_ffn_size // tp_size, ("model.ffn_size", "model.hidden_size")),
        (
            "number of tokens in a micro-batch",
            model.seq_len * config.batch.micro_batch_size,
            ("model.seq_len", "batch.micro_batch_size"),
        ),
    )
    for what, size, keys in sizes:
        if size % DIM_MULTIPLE:
            fitting = alternatives(multiples_around(DIM_MULTIPLE, size))
            yield Problem(
                ("fp8.recipe", "parallel.tp_size", *keys),
                f'fp8.recipe="{config.fp8.recipe}" needs multiples of {DIM_MULTIPLE}, and the {what} is {size}; '
                f"change {' or '.join(keys)} so that it is {fitting}",
            )
