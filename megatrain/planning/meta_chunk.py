"""The chunks of the model that one rank holds: built on the meta device and cut by the tensor plan, without memory.

The only place that knows both the model's parts and the tensor plan. The trainer gives such chunks memory, planning
counts what that would be: both speak of the same parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatrain.comm.group import Group
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.model import ModelPart, Transformer
from megatrain.ops.cross_entropy import LossTerms
from megatrain.parallel.rematerialize import Rematerializer
from megatrain.parallel.sharding import LogicalParameter
from megatrain.parallel.stages import chunk_layers
from megatrain.parallel.tensor_plan import TensorPlan, apply_tensor_plan


@dataclass(frozen=True, slots=True, eq=False)
class MetaChunk:
    """A cut chunk. `rematerializer` is the context in which the module's forward must run."""

    part: ModelPart
    module: Transformer
    parameters: tuple[LogicalParameter, ...]
    rematerializer: Rematerializer


def build_meta_chunks(config: Config, layout: Layout, stage: int, tp: Group) -> list[MetaChunk]:
    """Return the chunks of `stage` as rank number tp.rank of its tensor-parallel group holds them.

    Where both ends of a tied model are chunks of this stage, they have one parameter: the first chunk's.
    Raises: TopologyError when a parameter cannot be cut.
    """
    chunks = [_build_meta_chunk(config, layout, stage, chunk, tp) for chunk in range(config.parallel.num_chunks)]
    first, last = chunks[0], chunks[-1]
    if first is last or not config.model.has_tied_head or layout.pp_size > 1:
        return chunks
    assert first.module.embedding is not None
    assert last.module.loss_head is not None
    copy = last.module.loss_head.weight
    last.module.loss_head.weight = first.module.embedding.word.weight
    own = tuple(logical for logical in last.parameters if logical.parameter is not copy)
    return [*chunks[:-1], replace(last, parameters=own)]


def _build_meta_chunk(config: Config, layout: Layout, stage: int, chunk: int, tp: Group) -> MetaChunk:
    part = _model_part(config, layout, stage, chunk)
    loss_terms = LossTerms(z_loss=config.train.z_loss, label_smoothing=config.train.label_smoothing)
    with torch.device("meta"):
        module = Transformer(config.model, part, config.train.seed, config.kernels, loss_terms)
    plan = TensorPlan(
        group=tp,
        recompute=config.parallel.recompute,
        vocab_size=config.model.vocab_size,
        has_tied_head=config.model.has_tied_head,
        is_head_elsewhere=layout.pp_size > 1,
        loss_terms=loss_terms,
        num_sequence_chunks=config.parallel.num_sequence_chunks,
        has_overlap=config.parallel.overlap,
        whole_layers=[layer for layer in part.layers if config.fp8.covers(layer)],
    )
    parameters, rematerializer = apply_tensor_plan(module, plan)
    return MetaChunk(part, module, tuple(parameters), rematerializer)


def _model_part(config: Config, layout: Layout, stage: int, chunk: int) -> ModelPart:
    """Return which layers and ends the chunk holds."""
    num_chunks = config.parallel.num_chunks
    return ModelPart(
        layers=chunk_layers(config.model.num_layers, layout.pp_size, num_chunks, stage, chunk),
        has_embedding=stage == 0 and chunk == 0,
        has_head=stage == layout.pp_size - 1 and chunk == num_chunks - 1,
    )
