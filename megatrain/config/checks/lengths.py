"""Rules of the sample lengths of a run: those of training in every stage, and that of evaluations.

All are checked before the start, so that no stage fails when it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatrain.config.checks.context import Context
from megatrain.config.config import Config
from megatrain.config.fp8 import DIM_MULTIPLE
from megatrain.config.problem import Problem, multiples_around
from megatrain.config.toml_text import setting
from megatrain.formatting import alternatives

_PARTS = ("data.block_tokens", "data.part_tokens")


def length_problems(context: Context) -> Iterator[Problem]:
    """Yield why samples of some length cannot be computed, or cannot follow each other."""
    config = context.config
    lengths = _training_lengths(config)
    stated = dict(lengths)
    if config.evaluation.seq_len:
        stated["evaluation.seq_len"] = config.evaluation.seq_len
    for key, seq_len in stated.items():
        yield from _model_problems(config, key, seq_len)
        yield from _layout_problems(config, key, seq_len)
    first = {} if config.data.seq_len else {"model.seq_len": config.model.seq_len}
    yield from _part_problems(config, {**first, **lengths})
    changing = next((key for key, seq_len in lengths.items() if seq_len != config.seq_len), None)
    if changing is not None:
        yield from _change_problems(config, changing, lengths[changing])


def _training_lengths(config: Config) -> Mapping[str, int]:
    """Return the lengths of training samples that keys set, by key."""
    found = {"data.seq_len": config.data.seq_len}
    for section, stage in config.sections_of("data_stage").items():
        found[f"{section}.seq_len"] = stage.seq_len
    return {key: seq_len for key, seq_len in found.items() if seq_len}


def _model_problems(config: Config, key: str, seq_len: int) -> Iterator[Problem]:
    longest = config.model.seq_len
    if seq_len > longest:
        yield Problem(
            (key, "model.seq_len"),
            f"{key}={seq_len} must be at most model.seq_len={longest}, the most tokens of a sample that the model "
            f"takes; use {longest} or less, or model.seq_len={seq_len} with data.seq_len={config.seq_len}",
        )


def _layout_problems(config: Config, key: str, seq_len: int) -> Iterator[Problem]:
    """Yield why samples of this length cannot be divided among ranks and chunks, or multiplied in FP8.

    Other rules check model.seq_len.
    """
    parallel, micro_batch_size = config.parallel, config.batch.micro_batch_size
    parts = parallel.tp_size * parallel.num_sequence_chunks
    if seq_len % parts:
        fitting = alternatives(multiples_around(parts, seq_len))
        yield Problem(
            (key, "parallel.tp_size", "parallel.num_sequence_chunks"),
            f"{key}={seq_len} must be divisible by parallel.tp_size={parallel.tp_size} times parallel."
            f"num_sequence_chunks={parallel.num_sequence_chunks}; use {fitting}",
        )
    if config.fp8.is_used and seq_len * micro_batch_size % DIM_MULTIPLE:
        yield Problem(
            (key, "batch.micro_batch_size", "fp8.recipe"),
            f'fp8.recipe="{config.fp8.recipe}" needs multiples of {DIM_MULTIPLE}, and a micro-batch with '
            f"{key}={seq_len} has {seq_len * micro_batch_size} tokens; use another length or batch.micro_batch_size",
        )


def _part_problems(config: Config, lengths: Mapping[str, int]) -> Iterator[Problem]:
    block, part = config.data.block_tokens, config.data.part_tokens
    if config.data.packing != "none":
        if block:
            yield Problem(
                ("data.block_tokens", "data.packing"),
                f"data.block_tokens={block} divides a stream of tokens, and with "
                f"{setting('data.packing', config.data.packing)} a part consists of the blocks of documents that are "
                "packed together; use block_tokens=0",
            )
        return
    if bool(block) != bool(part):
        set_key, other = _PARTS if block else _PARTS[::-1]
        yield Problem(_PARTS, f"{set_key}={block or part} does nothing with {other}=0; set both, or use 0 for both")
        return
    if not block:
        return
    if part % block:
        fitting = alternatives(multiples_around(block, part))
        yield Problem(_PARTS, f"data.part_tokens={part} must be a multiple of data.block_tokens={block}; use {fitting}")
    for key, seq_len in lengths.items():
        if block % seq_len:
            yield Problem(
                ("data.block_tokens", key),
                f"data.block_tokens={block} must be a multiple of {key}={seq_len}, so that no sample crosses a block; "
                f"use {alternatives(multiples_around(seq_len, block))}, or another length",
            )


def _change_problems(config: Config, key: str, seq_len: int) -> Iterator[Problem]:
    """Yield what cannot follow a change of the sample length, which `key` makes."""
    refused = (
        ("kernels.cuda_graphs", config.kernels.cuda_graphs, False, "a captured micro-batch has one length"),
        (
            "parallel.offload_layers",
            config.parallel.offload_layers,
            0,
            "which tensors wait in host memory follows from one length",
        ),
    )
    for other, value, allowed, reason in refused:
        if value != allowed:
            yield Problem(
                (key, other),
                f"{key}={seq_len} changes the sample length, but {setting(other, value)} allows one only: {reason}; "
                f"use {setting(other, allowed)}, or one length for the whole run",
            )
