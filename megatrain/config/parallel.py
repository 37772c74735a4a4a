"""Section [parallel]: how the model and the batch are spread over ranks, and what overlaps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod
from typing import Literal

from megatrain.config.options import option
from megatrain.contracts.layout import SIZED_AXES, WITHIN_REPLICA, Axis
from megatrain.schedule import (
    CHUNKED_NAMES,
    KINDS,
    ChunkPlacement,
    Schedule,
    ScheduleKind,
    ScheduleName,
    build_schedule,
    forward_only,
)

LARGEST_SIZE = 10_000_000
"""More than any cluster: the largest known runs have tens of thousands of ranks."""
LARGEST_BUCKET = 40_000_000
"""Elements that suffice to use a link fully, whatever the layers' size: Megatron-LM's choice."""
SMALLEST_SHARD = 1 << 16
"""Elements per rank of a bucket: in fp32 a quarter MiB, for which a link of 25 GB/s takes 10 us, about its latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model and the batch are spread over ranks."""

    tp_size: int = option(
        1,
        "Tensor parallel: ranks that each compute a part of every layer. Outside the linear layers they split the "
        "sequence (sequence parallelism). Keep it inside one host.",
        unit="ranks",
        minimum=1,
        maximum=LARGEST_SIZE,
    )
    num_sequence_chunks: int = option(
        1,
        "Chunks in which tensor-parallel ranks exchange their rows of the sequence, so that the collectives "
        "overlap with the matrix multiplications of a layer, in forward and backward. 1: all rows are exchanged at "
        "once, without overlap. More chunks hide more of the communication but make the multiplications smaller. "
        "Layers that multiply in FP8 always use 1.",
        unit="chunks",
        minimum=1,
        maximum=LARGEST_SIZE,
    )
    pp_size: int = option(
        1, "Pipeline parallel: stages that the layers are cut into.", unit="stages", minimum=1, maximum=LARGEST_SIZE
    )
    dp_size: int = option(
        0,
        "Data parallel: replicas of the model. 0: the world size / (tp_size * pp_size). It need not divide the "
        "micro-batches of a step: the first replicas then compute one more than the others.",
        unit="ranks",
        minimum=0,
        maximum=LARGEST_SIZE,
    )
    num_chunks: int = option(
        1,
        f"Model chunks on each stage; more than 1 with the {CHUNKED_NAMES} schedule only. They also help without a "
        "pipeline: the data-parallel collectives of one chunk overlap with the computation of the others.",
        minimum=1,
        maximum=LARGEST_SIZE,
    )
    layers_per_chunk: tuple[int, ...] = option(
        (),
        "Layers of each of the pp_size * num_chunks chunks, in the model's order: the first has the embedding, the "
        "last the head. Use it to balance the stages: the loss costs as much as several layers. The first and the "
        "last chunk may have 0 layers. Empty: the even split.",
        unit="layers",
        minimum=0,
    )
    counts_embedding_as_layer: bool = option(
        False,
        "Whether the even split counts the embedding as a layer, so that the first chunk has one layer less than "
        "the others. pp_size * num_chunks must then divide num_layers + 1, or + 2 with counts_head_as_layer.",
    )
    counts_head_as_layer: bool = option(
        False,
        "Whether the even split counts the head with its loss as a layer, so that the last chunk has one layer less.",
    )
    schedule: ScheduleName = option(  # noqa: RUF009 - the alias hides that the value is immutable
        "1f1b", " ".join(["Order of the pipeline.", *(f"{kind.name}: {kind.summary}." for kind in KINDS.values())])
    )
    zero_stage: Literal[1, 2] = option(
        1,
        "What is sharded over data-parallel ranks. 1: the optimizer's state and master weights. 2: also the gradients.",
    )
    overlap: bool = option(
        True, "Whether communication overlaps with computation. The results are the same without it, bit by bit."
    )
    has_aligned_reductions: bool = option(
        False,
        "Whether all stages start to reduce a chunk's gradients at the same time, when the last stage has finished the "
        "chunk, so that reductions slow all stages down at once and not one after the other. For pipelines of several "
        "chunks with zero_stage=1. The last reduction of a stage starts as soon as its gradients are complete.",
    )
    recompute: Literal["none", "selective", "full"] = option(
        "none",
        "Activations that backward recomputes and forward does not keep. selective: those of norms and of the "
        "activation function of the MLP. full: those of whole blocks.",
    )
    offload_layers: int = option(
        0,
        "Layers of each chunk, from its first, whose activations wait in host memory between forward and backward; "
        "a chunk of fewer layers offloads all. The copies overlap with the computation of other layers, so the "
        "last layers of a chunk should stay on the GPU. Saves GPU memory as recompute does, at the cost of traffic "
        "to the host; with both, only the inputs of blocks are copied. Without a GPU it saves nothing.",
        unit="layers",
        minimum=0,
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "Type of the gradients that data-parallel ranks exchange; they accumulate in fp32."
    )
    bucket_size: int = option(
        0,
        "Number of parameters at which a bucket is closed. The parameters of a chunk are divided into buckets; each is "
        "reduced and gathered in one collective. 0: the size of one layer's matrices on a rank, at most 40,000,000, "
        "but never less than 65,536 for each rank that has a shard of the bucket.",
        unit="elements",
        minimum=0,
    )

    @property
    def schedule_kind(self) -> ScheduleKind:
        return KINDS[self.schedule]

    @property
    def placement(self) -> ChunkPlacement:
        """Which stage holds which part of the model."""
        return self.schedule_kind.placement(self.pp_size, self.num_chunks)

    @property
    def layers_for_ends(self) -> tuple[int, int]:
        """The number of layers, 0 or 1, that the even split counts for the embedding and for the head."""
        return int(self.counts_embedding_as_layer), int(self.counts_head_as_layer)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis that can be configured, by its key; dp_size may be 0, unlike in a Layout."""
        return {axis.size_name: getattr(self, axis.size_name) for axis in configurable_axes()}

    @property
    def replica_sizes(self) -> dict[str, int]:
        """The sizes of the axes along which one replica of the model is spread."""
        axes = (axis for axis in configurable_axes() if axis.name in WITHIN_REPLICA)
        return {axis.size_name: self.sizes[axis.size_name] for axis in axes}

    @property
    def overlaps_by_bucket(self) -> bool:
        """Whether a chunk's gathers and reductions overlap with its own computation, bucket by bucket.

        Aligned reductions wait for the other stages.
        """
        return self.overlap and not self.has_aligned_reductions

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one replica of the model."""
        return prod(self.replica_sizes.values())

    def build_schedule(self, num_microbatches: int) -> Schedule:
        """Return the actions of each stage in a training step of `num_microbatches`.

        Raises: TopologyError with the rule and the hint when such a schedule is impossible.
        """
        return build_schedule(
            self.schedule,
            self.pp_size,
            self.num_chunks,
            num_microbatches,
            receives_ahead=self._receives_ahead,
            has_aligned_reductions=self.has_aligned_reductions,
        )

    def forward_only(self, num_microbatches: int) -> Schedule:
        """Return the actions of each stage in an evaluation of `num_microbatches`."""
        return forward_only(self.placement, num_microbatches, self._receives_ahead)

    @property
    def _receives_ahead(self) -> int:
        return 1 if self.overlap else 0


def configurable_axes() -> tuple[Axis, ...]:
    """Return the axes whose size is an option: those that the packages comm and parallel implement."""
    options = {option.name for option in fields(ParallelConfig)}
    return tuple(axis for axis in SIZED_AXES if axis.size_name in options)
