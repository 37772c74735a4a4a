"""The chunks that a rank holds, built on the meta device as the trainer builds them, and what they need in memory.

The parameters come from the model and the tensor plan themselves, not from formulas: a plan that changes changes the
plan's memory here. Nothing is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.comm.group import Group
from megatrain.config.config import Config
from megatrain.contracts.layout import Layout
from megatrain.model import ModelPart
from megatrain.parallel.bucket import group_into_buckets, padded_numel
from megatrain.parallel.sharding import LogicalParameter
from megatrain.planning.blocks import block_footprint, fp8_staying, norm_kept
from megatrain.planning.ends import embedding_footprint, head_footprint
from megatrain.planning.footprint import Footprint, in_a_row
from megatrain.planning.meta_chunk import build_meta_chunks
from megatrain.planning.offload import offloaded_blocks
from megatrain.planning.tensor_bytes import TensorBytes


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """One chunk of a stage."""

    part: ModelPart
    parameters: tuple[LogicalParameter, ...]

    @property
    def num_parameters(self) -> int:
        """Elements that the rank holds, without padding."""
        return sum(logical.parameter.numel() for logical in self.parameters)

    def bucket_sizes(self, bucket_size: int, dp_size: int) -> tuple[int, ...]:
        """Return the elements of each bucket, padding included."""
        return tuple(padded_numel(bucket, dp_size) for bucket in group_into_buckets(self.parameters, bucket_size))

    def footprint(self, config: Config, sizes: TensorBytes) -> Footprint:
        """Return what a micro-batch needs on this chunk."""
        block = block_footprint(config, sizes)
        num_norms = 1 if config.model.block == "parallel" else 2
        parts = offloaded_blocks(
            block,
            len(self.part.layers),
            config.parallel.offload_layers,
            sizes,
            staying=num_norms * (norm_kept(config, sizes) - sizes.hidden_local) + fp8_staying(config, sizes),
            is_input_held=not self.part.has_embedding,
        )
        if self.part.has_embedding:
            parts.insert(0, embedding_footprint(config, sizes))
        if self.part.has_head:
            parts.append(head_footprint(config, sizes))
        return with_masks(sizes, in_a_row(parts))


def with_masks(sizes: TensorBytes, chunk: Footprint) -> Footprint:
    """Add the mask that all blocks of a chunk share and keep, and what makes it."""
    mask = sizes.mask
    if not mask:
        return chunk
    made_from = 2 * mask // sizes.element  # which pairs may meet, and one more condition
    forward = max(chunk.forward + mask, mask + made_from)
    return replace(chunk, kept=chunk.kept + mask, forward=forward, backward=chunk.backward + mask)


def plan_stage(config: Config, layout: Layout, stage: int, tp: Group) -> list[PlannedChunk]:
    """Return the chunks of `stage` as rank number tp.rank of its tensor-parallel group holds them.

    Raises: TopologyError when a parameter cannot be cut.
    """
    return [PlannedChunk(chunk.part, chunk.parameters) for chunk in build_meta_chunks(config, layout, stage, tp)]
