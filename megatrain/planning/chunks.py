"""The chunks of a stage as planning has them: the trainer's own, on meta, with what they need in memory.

Nothing is allocated: parameters, buckets and activations have their sizes alone. Chunks that differ in nothing but the
numbers of their layers are run once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatrain.chunk_builder import build_chunks, hidden_shape, pipeline_input
from megatrain.comm import Mesh
from megatrain.comm.dry_group import dry_group
from megatrain.comm.group import Group
from megatrain.config.config import Config
from megatrain.model import ModelPart
from megatrain.ops.device_kind import DeviceKind
from megatrain.parallel.bucket import Bucket
from megatrain.parallel.offload import ImmediateCopies
from megatrain.parallel.pipeline import PipelineInput
from megatrain.parallel.sharding import LogicalParameter
from megatrain.planning.footprint import HostCopies, MeasuredChunk, measure, standing_tensors, tensors_of

_META = torch.device("meta")
_ANY_GPU = DeviceKind("cuda", (9, 0))
"""On a GPU that is not known here: torch's kernels for attention are the same from Ampere on, but cuDNN's."""


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """One chunk of a stage."""

    part: ModelPart
    parameters: tuple[LogicalParameter, ...]
    buckets: tuple[Bucket, ...]
    measured: MeasuredChunk
    micro_batch_bytes: int
    """Of a micro-batch before it is computed: tokens, labels, documents."""

    @property
    def num_parameters(self) -> int:
        """Elements that the rank holds, without padding."""
        return sum(logical.parameter.numel() for logical in self.parameters)


def planned_kind(config: Config) -> DeviceKind:
    """Return the kind of device that a plan is for: "auto" counts as a GPU."""
    return DeviceKind("cpu") if config.runtime.device == "cpu" else _ANY_GPU


def plan_stage(config: Config, mesh: Mesh) -> list[PlannedChunk]:
    """Return the chunks of the stage of `mesh`, whose groups need no peers.

    Raises: TopologyError when a parameter cannot be cut.
    """
    kind, host = planned_kind(config), HostCopies()
    along = {
        axis: dry_group(group, kind.type, has_lane=axis != "tp" or config.parallel.num_sequence_chunks > 1)
        for axis, group in mesh.along.items()
    }
    tp = along["tp"]
    copies = ImmediateCopies() if kind.type == "cpu" else host
    built = build_chunks(config, replace(mesh, along=along), _META, copies, kind)
    micro = planned_micro_batch(config, tp)
    standing = [x for chunk in built for x in standing_tensors(chunk)]  # a tied head is another chunk's embedding
    measured: dict[tuple[object, ...], MeasuredChunk] = {}
    for chunk in built:
        key = _kind(config, chunk.meta.part)
        if key not in measured:
            measured[key] = measure(
                chunk,
                micro,
                hidden_shape(config, tp.size),
                standing,
                host.memory,
                is_split=config.parallel.schedule_kind.splits_backward,
                is_added=config.parallel.zero_stage == 1 and config.num_microbatches(mesh.layout.dp_size) > 1,
                is_by_bucket=config.parallel.overlaps_by_bucket and not config.kernels.cuda_graphs,
            )
    num_bytes = sum(x.nbytes for x in tensors_of(micro))
    return [
        PlannedChunk(
            chunk.meta.part,
            chunk.meta.parameters,
            tuple(chunk.data_parallel.buckets),
            measured[_kind(config, chunk.meta.part)],
            num_bytes,
        )
        for chunk in built
    ]


def planned_micro_batch(config: Config, tp: Group) -> PipelineInput:
    """Return a micro-batch on meta. With documents each sample is one: how many there are is not known."""
    shape = (config.model.seq_len, config.batch.micro_batch_size)
    tokens_SB = torch.empty(shape, dtype=torch.int64, device=_META)
    document_SB = torch.zeros(shape, dtype=torch.int64) if config.data.has_document_mask else None
    sample_B = torch.empty(shape[1], dtype=torch.int64, device=_META)
    return pipeline_input(tp, _META, tokens_SB, torch.empty_like(tokens_SB), sample_B, document_SB)


def _kind(config: Config, part: ModelPart) -> tuple[object, ...]:
    """Return all that two chunks must have in common to need the same memory."""
    return (part.has_embedding, part.has_head, *(config.fp8.covers(layer) for layer in part.layers))
