"""Rules for splitting the layers over the chunks of all stages."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.problem import Problem, divisors, multiples_around, nearest
from megatrain.config.toml_text import shortened, value_text
from megatrain.formatting import alternatives

_LAYERS, _LIST = "model.num_layers", "parallel.layers_per_chunk"
_STAGES, _CHUNKS = "parallel.pp_size", "parallel.num_chunks"
_COUNTS = ("parallel.counts_embedding_as_layer", "parallel.counts_head_as_layer")


def layer_problems(context: Context) -> Iterator[Problem]:
    """Yield why the split of the layers is impossible, and why the chunks have too few layers for offload_layers."""
    if not context.are_known(_LIST, *_COUNTS):
        return
    parallel = context.config.parallel
    found = [*_counting_problems(context), *(_list_problems if parallel.layers_per_chunk else _even_problems)(context)]
    yield from found or _offload_problems(context)


def _counting_problems(context: Context) -> Iterator[Problem]:
    """Yield the settings that count the embedding or the head as a layer, but have no effect."""
    parallel = context.config.parallel
    reason = (
        f"{_LIST} sets the layers of each chunk; use one of the two"
        if parallel.layers_per_chunk
        else f"with {_STAGES} * {_CHUNKS} = 1 there is only one chunk; use more chunks, or false"
        if parallel.placement.num_parts == 1
        else ""
    )
    for key, is_counted in zip(_COUNTS, parallel.layers_for_ends, strict=True):
        if is_counted and reason:
            yield Problem((key, _LIST, _STAGES, _CHUNKS), f"{key}=true does nothing: {reason}")


def _list_problems(context: Context) -> Iterator[Problem]:
    """Yield how the list of layers contradicts the chunks or the model."""
    parallel, num_layers = context.config.parallel, context.config.model.num_layers
    layers = parallel.layers_per_chunk
    found = f"{_LIST}={shortened(value_text(layers))}"
    num_chunks = parallel.placement.num_parts
    if len(layers) != num_chunks:
        yield Problem(
            (_LIST, _STAGES, _CHUNKS),
            f"{found} has {len(layers)} {'entry' if len(layers) == 1 else 'entries'} and must have one for each of "
            f"{_STAGES} * {_CHUNKS} = {parallel.pp_size} * {parallel.num_chunks} = {num_chunks} chunks, in the model's "
            "order; or use [] for the even split",
        )
        return
    if sum(layers) != num_layers:
        yield Problem(
            (_LIST, _LAYERS),
            f"{found} has {sum(layers)} layers in all and must have {_LAYERS}={num_layers}; change entries by "
            f"{num_layers - sum(layers):+d} in all, or use num_layers={sum(layers)}",
        )
    if 0 in layers[1:-1]:
        yield Problem(
            (_LIST,),
            f"{found} leaves chunk {layers.index(0, 1)} (counted from 0) without anything to compute: only the first, "
            "which has the embedding, and the last, which has the head, may have 0 layers; use at least 1",
        )


def _even_problems(context: Context) -> Iterator[Problem]:
    """Yield why the layers, with an embedding or head that counts as one, cannot be divided evenly."""
    parallel, num_layers = context.config.parallel, context.config.model.num_layers
    num_chunks, num_more = parallel.placement.num_parts, sum(parallel.layers_for_ends)
    num_counted = num_layers + num_more
    if not num_counted % num_chunks:
        return
    counted = f"{_LAYERS}={num_layers}"
    if num_more:
        ends = " and ".join(
            name
            for name, is_counted in zip(("the embedding", "the head"), parallel.layers_for_ends, strict=True)
            if is_counted
        )
        counted += f" and {ends}, {num_counted} in all,"
    sizes = [num_layers - num_more for num_layers in multiples_around(num_chunks, num_counted) if num_layers > num_more]
    list_text = f", or name the layers of each chunk in {_LIST}" if num_layers >= num_chunks else ""
    yield Problem(
        (_LAYERS, _STAGES, _CHUNKS),
        f"{counted} must be divisible by {_STAGES} * {_CHUNKS} = {parallel.pp_size} * {parallel.num_chunks} = "
        f"{num_chunks}; use num_layers={alternatives(sizes)}, or pp_size and num_chunks whose product is "
        f"{alternatives(nearest(divisors(num_counted), num_chunks))}{list_text}",
    )


def _offload_problems(context: Context) -> Iterator[Problem]:
    """Yield a problem if no chunk has as many layers as are to be offloaded."""
    offloaded, most = context.config.parallel.offload_layers, max(context.config.layers_per_chunk)
    if offloaded > most:
        yield Problem(
            ("parallel.offload_layers", _LAYERS, _STAGES, _CHUNKS, _LIST),
            f"parallel.offload_layers={offloaded} must be at most the layers of a chunk, of which none has more than "
            f"{most} ({_LAYERS}={context.config.model.num_layers} over {_STAGES} * {_CHUNKS} = "
            f"{context.config.parallel.pp_size} * {context.config.parallel.num_chunks}); use {most} or less",
        )
