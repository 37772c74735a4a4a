"""The chunks of the model that one rank holds: built on meta, sharded by the tensor plan, then allocated on a device.

Only this module combines the model's parts, the tensor plan, and everything that is set up around them. The trainer
builds chunks on its device and trains them. Planning builds the same chunks on meta, for the planned kind of device,
and runs them there. So both have the same parameters, buckets and saved tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatrain.comm import Mesh
from megatrain.comm.group import Group
from megatrain.config.config import Config
from megatrain.contracts.layout import STAGES, Layout
from megatrain.model import ModelPart, Transformer
from megatrain.model.fp8 import Fp8Scales, use_fp8
from megatrain.model.norm import use_norms
from megatrain.ops.attention_choice import DeviceKind
from megatrain.ops.cross_entropy import LossTerms
from megatrain.ops.precision import DTYPES, accumulate_dtype
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.offload import OffloadCopies, Offloader
from megatrain.parallel.pipeline import PipelineChunk
from megatrain.parallel.recompute import SelectiveRecompute, recompute_fully
from megatrain.parallel.sharding import LogicalParameter
from megatrain.parallel.tensor_plan import TensorPlan, apply_tensor_plan
from megatrain.parallel.update_rules import update_rule

SMALLEST_ACTIVATION_WIDTH = 16
"""Elements per token of the smallest activation that is worth offloading. A norm keeps only one or two per token."""


@dataclass(frozen=True, slots=True, eq=False)
class MetaChunk:
    """A sharded chunk on meta. `selective_recompute` is the context in which the module's forward must run."""

    part: ModelPart
    module: Transformer
    parameters: tuple[LogicalParameter, ...]
    selective_recompute: SelectiveRecompute


@dataclass(frozen=True, slots=True, eq=False)
class BuiltChunk:
    """A chunk on a device, with its buckets and everything that is set up around its modules. Its weights are zero."""

    meta: MetaChunk
    data_parallel: ChunkDataParallel
    fp8_scales: Fp8Scales | None

    @property
    def pipeline_chunk(self) -> PipelineChunk:
        return PipelineChunk(self.meta.module, self.meta.selective_recompute, self.data_parallel)


def build_chunks(
    config: Config, mesh: Mesh, device: torch.device, copies: OffloadCopies, device_kind: DeviceKind | None = None
) -> list[BuiltChunk]:
    """Return the chunks of this rank's stage on `device`.

    copies: copies the activations that the chunks offload to host memory and back.
    device_kind: the kind of device that kernels are chosen for, if `device` is meta.
    Raises: TopologyError when a parameter cannot be sharded; ImportError when a backend is not installed (not on meta).
    """
    metas = build_meta_chunks(config, mesh.layout, mesh.tp, rank=mesh.rank, device_kind=device_kind)
    built = [_on_device(config, mesh, number, meta, device) for number, meta in enumerate(metas)]
    if config.parallel.offload_layers:
        _offload_activations(config, mesh.tp, metas, copies)
    return built


def hidden_shape(config: Config, tp_size: int) -> tuple[int, int, int]:
    """Return (S / tp, B, H), the shape of a rank's part of a micro-batch's hidden states outside of the sublayers.

    S is the sample length at the beginning of the run.
    """
    return config.seq_len // tp_size, config.batch.micro_batch_size, config.model.hidden_size


def build_meta_chunks(
    config: Config, layout: Layout, tp: Group, *, rank: int, device_kind: DeviceKind | None = None
) -> list[MetaChunk]:
    """Return the chunks of the stage of the global `rank`, sharded for that rank. tp: its tensor-parallel group.

    If this stage has both the embedding and the head of a model with tied embeddings, they use one parameter, which the
    first chunk owns.
    Raises: TopologyError when a parameter cannot be sharded.
    """
    chunks = [
        _build_meta_chunk(config, layout, rank, chunk, tp, device_kind) for chunk in range(config.parallel.num_chunks)
    ]
    first, last = chunks[0], chunks[-1]
    if first is last or not config.model.has_tied_head or layout.pp_size > 1:
        return chunks
    assert first.module.embedding is not None
    assert last.module.loss_head is not None
    copy = last.module.loss_head.weight
    last.module.loss_head.weight = first.module.embedding.word.weight
    own = tuple(logical for logical in last.parameters if logical.parameter is not copy)
    tied = last.module.loss_head.weight
    shared = tuple(
        replace(logical, num_writes=logical.num_writes + 1) if logical.parameter is tied else logical
        for logical in first.parameters
    )
    return [replace(first, parameters=shared), *chunks[1:-1], replace(last, parameters=own)]


def _build_meta_chunk(
    config: Config, layout: Layout, rank: int, chunk: int, tp: Group, device_kind: DeviceKind | None
) -> MetaChunk:
    part = _model_part(config, layout.index(STAGES, rank), chunk)
    loss_terms = LossTerms(z_loss=config.train.z_loss, label_smoothing=config.train.label_smoothing)
    with torch.device("meta"):
        module = Transformer(config.model, part, config.train.seed, config.kernels, loss_terms, device_kind)
    plan = TensorPlan(
        table=decoder_table(config.model, has_two_ends=config.model.has_tied_head and layout.pp_size > 1),
        layout=layout,
        rank=rank,
        group=tp,
        recompute=config.parallel.recompute,
        vocab_size=config.model.vocab_size,
        loss_terms=loss_terms,
        num_sequence_chunks=config.parallel.num_sequence_chunks,
        has_overlap=config.parallel.overlap,
        whole_layers=[layer for layer in part.layers if config.fp8.covers(layer)],
    )
    found, selective_recompute = apply_tensor_plan(module, plan)
    groups = config.parameter_groups
    parameters = tuple(
        replace(
            parameter,
            rule=update_rule(config.optimizer, groups, parameter.name, is_hidden_weight=parameter.hidden is not None),
        )
        for parameter in found
    )
    return MetaChunk(part, module, parameters, selective_recompute)


def _model_part(config: Config, stage: int, chunk: int) -> ModelPart:
    placement = config.parallel.placement
    return ModelPart(
        layers=config.layers_of(stage, chunk),
        has_embedding=placement.is_first(stage, chunk),
        has_head=placement.is_last(stage, chunk),
    )


def _on_device(config: Config, mesh: Mesh, number: int, meta: MetaChunk, device: torch.device) -> BuiltChunk:
    """Create the buckets of chunk `number` of the stage on `device`, and set up its norms, FP8 and recompute."""
    use_norms(meta.module, config.kernels, device)
    scales = use_fp8(meta.module, config.fp8, device)
    if config.parallel.recompute == "full":
        for block in meta.module.all_blocks:
            recompute_fully(block)
    options = _data_parallel_options(config, mesh.layout)
    data_parallel = ChunkDataParallel(meta.parameters, mesh.by_name, options, device, number)
    return BuiltChunk(meta, data_parallel, scales)


def _data_parallel_options(config: Config, layout: Layout) -> DataParallelOptions:
    dtype = DTYPES[config.train.precision]
    gradient_dtype = accumulate_dtype(dtype)
    return DataParallelOptions(
        zero_stage=config.parallel.zero_stage,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        reduce_dtype=torch.bfloat16 if config.parallel.grad_reduce_dtype == "bf16" else gradient_dtype,
        bucket_size=config.bucket_size(layout),
        has_overlap=config.parallel.overlap,
    )


def _offload_activations(config: Config, tp: Group, metas: Sequence[MetaChunk], copies: OffloadCopies) -> None:
    """Make the first layers of each chunk offload their activations. All chunks use the same `copies`.

    The parameters must already have their memory, because the offloader recognizes parameters by their memory.
    """
    rows, samples, _ = hidden_shape(config, tp.size)
    for meta in metas:
        offloader = Offloader(copies, smallest_numel=SMALLEST_ACTIVATION_WIDTH * rows * samples)
        offloader.attach(meta.module, list(meta.module.blocks.values()), config.parallel.offload_layers)
        meta.selective_recompute.keeper = offloader
