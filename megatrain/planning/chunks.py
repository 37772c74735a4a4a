"""The chunks of a stage for planning: the trainer's own chunks, on the meta device, with the memory that they need.

Nothing is allocated: parameters, buckets and activations only have sizes. Of chunks that have
layers of the same kinds, embedding and head included, only one is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from megatrain.chunks.builder import BuiltChunk, build_chunks, hidden_shape
from megatrain.chunks.inputs import InputCopies, pipeline_input
from megatrain.comm import Mesh, dry_mesh
from megatrain.comm.group import Group
from megatrain.config.config import Config
from megatrain.config.pictures import patch_width
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.model import ModelPart, PatchRows
from megatrain.ops.attention_choice import DeviceKind
from megatrain.ops.documents import PackedDocuments
from megatrain.parallel.bucket import Bucket
from megatrain.parallel.offload import ImmediateCopies
from megatrain.parallel.pipeline import PipelineInput
from megatrain.parallel.sharding import LogicalParameter
from megatrain.planning.footprint import (
    HostCopies,
    MeasuredChunk,
    measure,
    parameter_tensors,
    tensors_of,
)
from megatrain.telemetry.step_summary import OperationTotals

_META = torch.device("meta")
_ANY_GPU = DeviceKind("cuda", (9, 0))
"""The GPU of the job, which is unknown here. torch's attention kernels are the same from Ampere on, except cuDNN's."""


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """One chunk of a stage."""

    part: ModelPart
    parameters: tuple[LogicalParameter, ...]
    buckets: tuple[Bucket, ...]
    borrowed: tuple[Bucket, ...]
    """Buckets of the stage's other chunks whose parameters this chunk uses too: of the embedding for a tied head."""
    measured: MeasuredChunk
    micro_batch_bytes: int
    """Bytes of the input of a micro-batch: tokens, labels, documents, patches."""
    tokens_sent: int
    """Bytes that a rank sends to other tp ranks for a micro-batch, forward and backward."""

    @property
    def num_parameters(self) -> int:
        """Elements that the rank holds, without padding."""
        return sum(logical.parameter.numel() for logical in self.parameters)


def planned_kind(config: Config) -> DeviceKind:
    """Return the kind of device that a plan is for: "auto" counts as a GPU."""
    return DeviceKind("cpu") if config.runtime.device == "cpu" else _ANY_GPU


def replays_graphs(config: Config) -> bool:
    """Return whether the planned device replays micro-batches as CUDA graphs; a CPU never does."""
    return config.kernels.cuda_graphs and planned_kind(config).type == "cuda"


def planned_mesh(config: Config, layout: Layout, rank: int) -> AbstractContextManager[Mesh]:
    """Return the mesh of `rank` for planning: without peers, with the exchanges of the planned kind of device."""
    parallel = config.parallel
    return dry_mesh(
        layout,
        rank,
        device_type=planned_kind(config).type,
        has_wrap_links=parallel.num_chunks > 1,
        holders=config.holders,
        has_sequence_chunks=parallel.num_sequence_chunks > 1,
    )


def plan_stage(config: Config, mesh: Mesh) -> list[PlannedChunk]:
    """Return the chunks of the stage of `mesh`, which is from planned_mesh.

    Raises: TopologyError when a parameter cannot be sharded.
    """
    kind, host, recorder, tp = planned_kind(config), HostCopies(), mesh.recorder, mesh.tp
    assert mesh.device.type == kind.type, f"a mesh on {mesh.device.type} for a plan of {kind.type}"
    recorder.set_step(0)
    copies = ImmediateCopies() if kind.type == "cpu" else host
    built = build_chunks(config, mesh, _META, copies, kind)
    micro = planned_micro_batch(config, tp, has_patches=config.model.has_pictures and mesh.stage == 0)
    measured: dict[tuple[object, ...], tuple[MeasuredChunk, int]] = {}
    for chunk in built:
        key = _kind(config, chunk.meta.part)
        if key not in measured:
            recorder.complete_step()  # the totals begin at zero
            # of all chunks, because a tied head uses another chunk's embedding; again for each chunk, because with
            # ZeRO-2 a measurement reduces its gradients and frees them
            existing = [x for other in built for x in parameter_tensors(other)]
            found = measure(
                chunk,
                micro,
                hidden_shape(config, tp.size),
                existing,
                host.memory,
                is_split=config.parallel.schedule_kind.splits_backward,
                is_added=config.parallel.zero_stage == 1 and config.num_microbatches(mesh.layout) > 1,
                is_by_bucket=config.parallel.overlaps_by_bucket and not replays_graphs(config),
            )
            sent = _tokens_sent(recorder.complete_step().totals, tp)
            measured[key] = found, sent // found.num_microbatches
    num_bytes = sum(x.nbytes for x in tensors_of(micro))
    planned = []
    for chunk in built:
        found, sent = measured[_kind(config, chunk.meta.part)]
        buckets, part = tuple(chunk.data_parallel.buckets), chunk.meta.part
        borrowed = _borrowed_buckets(chunk, built)
        planned.append(PlannedChunk(part, chunk.meta.parameters, buckets, borrowed, found, num_bytes, sent))
    return planned


def _borrowed_buckets(chunk: BuiltChunk, built: Sequence[BuiltChunk]) -> tuple[Bucket, ...]:
    used = set(chunk.meta.module.parameters())
    others = [bucket for other in built if other is not chunk for bucket in other.data_parallel.buckets]
    return tuple(bucket for bucket in others if any(logical.parameter in used for logical in bucket.parameters))


def planned_micro_batch(config: Config, tp: Group, *, has_patches: bool = False) -> PipelineInput:
    """Return a micro-batch on meta. With a document mask each sample is one document: the real number is not known.

    has_patches: each sample has a picture. No other micro-batch of a mixture needs more memory.
    """
    shape = (config.seq_len, config.batch.micro_batch_size)
    tokens_SB = torch.empty(shape, dtype=torch.int64, device=_META)
    sample_B = torch.empty(shape[1], dtype=torch.int64, device=_META)
    documents = None
    if config.data.has_document_mask:
        starts = tuple(torch.empty(2, dtype=torch.int32, device=_META) for _ in range(shape[1]))
        documents = PackedDocuments(torch.empty_like(tokens_SB, dtype=torch.int32), starts, shape[:1] * shape[1])
    pictures = None
    if has_patches:
        patch_shape = (config.model.num_patches, shape[1], patch_width(config.model))
        pictures = PatchRows.of_all(torch.empty(patch_shape, dtype=torch.uint8, device=_META))
    labels_SB = torch.empty_like(tokens_SB)
    return pipeline_input(tp, InputCopies.to(_META), tokens_SB, labels_SB, sample_B, documents, pictures)


def _kind(config: Config, part: ModelPart) -> tuple[object, ...]:
    """Return the properties that two chunks must have in common to need the same memory."""
    return (part.has_embedding, part.has_head, *(config.layer_kind(layer) for layer in part.layers))


def _tokens_sent(totals: Mapping[Operation, OperationTotals], tp: Group) -> int:
    """Return the bytes that a rank sends to the other tp ranks in the recorded exchanges of tokens."""
    gathered, scattered = (
        totals[operation].num_bytes if operation in totals else 0
        for operation in (Operation.TP_ALL_GATHER, Operation.TP_REDUCE_SCATTER)
    )
    # a record has the bytes of this rank's input: its shard of a gather, the whole of a reduce-scatter
    return (tp.size - 1) * (gathered + scattered // tp.size)
