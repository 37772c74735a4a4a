"""Rules of the layout: tensor parallel against the model, chunks against the schedule, ranks against the world size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megatrain.config.checks.context import Context
from megatrain.config.checks.layers import layer_problems
from megatrain.config.problem import Problem, divisors, multiples_around, nearest
from megatrain.formatting import alternatives
from megatrain.schedule import CHUNKED_NAMES, layout_infeasibilities


def parallel_problems(context: Context) -> Iterator[Problem]:
    """Yield why the layout is impossible."""
    yield from _tensor_parallel_problems(context)
    yield from _sequence_chunk_problems(context)
    yield from _schedule_problems(context)
    yield from _split_backward_problems(context)
    yield from _alignment_problems(context)
    yield from layer_problems(context)
    yield from _world_size_problems(context)
    parallel, train = context.config.parallel, context.config.train
    if parallel.grad_reduce_dtype == "bf16" and train.precision != "bf16":
        yield Problem(
            ("parallel.grad_reduce_dtype", "train.precision"),
            f'parallel.grad_reduce_dtype="bf16" needs train.precision="bf16", found "{train.precision}"; '
            f'use grad_reduce_dtype="fp32" or precision="bf16"',
        )


class _Split(NamedTuple):
    """A dimension that tensor parallelism cuts into equal parts.

    has_holders: if there are more ranks than the size, several ranks may hold the same part.
    """

    text: str
    size: int
    keys: tuple[str, ...]
    extra_hint: str = ""
    has_holders: bool = False

    @property
    def rule(self) -> str:
        return f"must divide {self.text}" + (" or be a multiple of it" if self.has_holders else "")

    def fits(self, tp_size: int) -> bool:
        return self.size % tp_size == 0 or (self.has_holders and tp_size % self.size == 0)


def _splits(context: Context) -> list[_Split]:
    model, tp_size = context.config.model, context.config.parallel.tp_size
    splits = [
        _Split(f"model.num_heads={model.num_heads}", model.num_heads, ("model.num_heads",)),
        _Split(
            f"model.ffn_size={model.resolved_ffn_size}",
            model.resolved_ffn_size,
            ("model.ffn_size",) if model.ffn_size else ("model.ffn_size", "model.hidden_size"),
        ),
        _Split(
            f"the padded vocabulary of {model.padded_vocab_size} (model.vocab_size={model.vocab_size} rounded up to "
            f"model.vocab_multiple={model.vocab_multiple})",
            model.padded_vocab_size,
            ("model.vocab_size", "model.vocab_multiple"),
            f", or model.vocab_multiple={math.lcm(model.vocab_multiple, tp_size)}",
        ),
        _Split(f"model.seq_len={model.seq_len} (sequence parallelism)", model.seq_len, ("model.seq_len",)),
    ]
    if model.num_kv_heads:
        text, key = f"model.num_kv_heads={model.num_kv_heads}", "model.num_kv_heads"
        splits.insert(1, _Split(text, model.num_kv_heads, (key,), has_holders=True))
    return [split for split in splits if context.are_known(*split.keys)]


def _tensor_parallel_problems(context: Context) -> Iterator[Problem]:
    tp_size = context.config.parallel.tp_size
    splits = _splits(context)
    # The suggested sizes satisfy every one of the rules, not only the broken one.
    exact = [split.size for split in splits if not split.has_holders] or [split.size for split in splits]
    common = [size for size in divisors(math.gcd(*exact)) if all(split.fits(size) for split in splits)] if exact else []
    fitting = alternatives(nearest(common, tp_size))
    for split in splits:
        if not split.fits(tp_size):
            text = f"parallel.tp_size={tp_size} {split.rule}; use {fitting}{split.extra_hint}"
            yield Problem(("parallel.tp_size", *split.keys), text)


def _sequence_chunk_problems(context: Context) -> Iterator[Problem]:
    parallel, model = context.config.parallel, context.config.model
    num_chunks, tp_size = parallel.num_sequence_chunks, parallel.tp_size
    if num_chunks == 1:
        return
    found = f"parallel.num_sequence_chunks={num_chunks}"
    if tp_size == 1:
        yield Problem(
            ("parallel.num_sequence_chunks", "parallel.tp_size"),
            f"{found} does nothing with parallel.tp_size=1; use tp_size=2 or more, or num_sequence_chunks=1",
        )
    elif model.seq_len % tp_size == 0 and model.seq_len // tp_size % num_chunks:
        num_rows = model.seq_len // tp_size
        yield Problem(
            ("parallel.num_sequence_chunks", "parallel.tp_size", "model.seq_len"),
            f"{found} must divide model.seq_len / parallel.tp_size = {model.seq_len} / {tp_size} = {num_rows}; "
            f"use {alternatives(nearest(divisors(num_rows), num_chunks))}",
        )
    if all(context.config.fp8.covers(layer) for layer in range(model.num_layers)):
        yield Problem(
            ("parallel.num_sequence_chunks", "fp8.recipe"),
            f"{found} does nothing if all layers multiply in FP8, which needs all rows at once; use "
            'num_sequence_chunks=1 or fp8.recipe="none"',
        )


def _schedule_problems(context: Context) -> Iterator[Problem]:
    """Yield why the schedule cannot be built with these stages and chunks."""
    parallel = context.config.parallel
    for found in layout_infeasibilities(parallel.schedule, parallel.pp_size, parallel.num_chunks):
        yield Problem(found.keys, found.text)


def _alignment_problems(context: Context) -> Iterator[Problem]:
    """Yield the settings with which aligned reductions have no effect."""
    parallel = context.config.parallel
    if not parallel.has_aligned_reductions:
        return
    if parallel.pp_size == 1:
        yield Problem(
            ("parallel.has_aligned_reductions", "parallel.pp_size"),
            "parallel.has_aligned_reductions=true makes the stages of a pipeline reduce together, and "
            "parallel.pp_size=1 has one stage; use has_aligned_reductions=false or pp_size=2",
        )
    if parallel.num_chunks == 1:
        yield Problem(
            ("parallel.has_aligned_reductions", "parallel.num_chunks"),
            "parallel.has_aligned_reductions=true defers reductions behind later computes of their stage, and "
            "parallel.num_chunks=1 reduces after the last one; use has_aligned_reductions=false, or num_chunks=2 "
            f'with schedule="{CHUNKED_NAMES}"',
        )
    if parallel.zero_stage == 2:
        yield Problem(
            ("parallel.has_aligned_reductions", "parallel.zero_stage"),
            "parallel.has_aligned_reductions=true defers the reduction of a chunk's gradients, and "
            "parallel.zero_stage=2 reduces after every micro-batch; use zero_stage=1 or has_aligned_reductions=false",
        )


def _split_backward_problems(context: Context) -> Iterator[Problem]:
    """Yield the settings that conflict with a schedule that defers the gradients of weights."""
    config = context.config
    parallel = config.parallel
    if not parallel.schedule_kind.splits_backward:
        return
    schedule = f'parallel.schedule="{parallel.schedule}"'
    if parallel.zero_stage == 2:
        yield Problem(
            ("parallel.zero_stage", "parallel.schedule"),
            f"parallel.zero_stage=2 releases a micro-batch's gradients after its backward, and {schedule} defers most "
            'of them; use zero_stage=1 or schedule="1f1b"',
        )
    if parallel.num_sequence_chunks > 1:
        yield Problem(
            ("parallel.num_sequence_chunks", "parallel.schedule"),
            f"parallel.num_sequence_chunks={parallel.num_sequence_chunks} overlaps collectives with matrix "
            f'multiplications that {schedule} defers; use num_sequence_chunks=1 or schedule="1f1b"',
        )
    if config.fp8.is_used and config.fp8.backend == "transformer_engine":
        yield Problem(
            ("fp8.backend", "parallel.schedule"),
            'fp8.backend="transformer_engine" computes weights\' gradients in its own backward, where '
            f'{schedule} cannot defer them; use backend="megatrain" or schedule="1f1b"',
        )


def _world_size_problems(context: Context) -> Iterator[Problem]:
    parallel, world_size = context.config.parallel, context.world_size
    if world_size is None:
        return
    replica = parallel.ranks_per_replica
    needed = replica * max(1, parallel.dp_size)
    if world_size == needed or (parallel.dp_size == 0 and world_size % replica == 0):
        return
    fitting_sizes = str(needed) if parallel.dp_size else alternatives(multiples_around(replica, world_size))
    hints = [f"start {fitting_sizes} processes"]
    if world_size % replica == 0:
        hints.append(f"set dp_size={world_size // replica}, or 0 to have it follow the world size")
    else:
        fitting = alternatives(nearest(divisors(world_size), replica))
        hints.append(f"use {' and '.join(parallel.replica_sizes)} whose product is {fitting}")
    sizes = {"dp_size": parallel.dp_size, **parallel.replica_sizes} if parallel.dp_size else parallel.replica_sizes
    product = f"parallel.{' * '.join(sizes)} = {' * '.join(map(str, sizes.values()))}"
    if parallel.dp_size:
        rule = f"{product} = {needed} must equal the world size of {world_size} processes"
    else:
        rule = f"{product} = {replica} must divide the world size of {world_size} processes"
    keys = tuple(f"parallel.{name}" for name in dict.fromkeys([*sizes, "dp_size"]))
    yield Problem(keys, f"{rule}; {', or '.join(hints)}")
