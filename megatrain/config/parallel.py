"""Section [parallel]: how the model and the batch are spread over ranks, and what overlaps."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import prod
from typing import Literal

from megatrain.config.options import option
from megatrain.contracts.layout import SIZED_AXES, Axis
from megatrain.schedule import CHUNKED_NAMES, KINDS, Placement, Schedule, ScheduleKind, build_schedule, forward_only

LARGEST_SIZE = 10_000_000
"""Beyond every cluster: the largest runs known have tens of thousands of ranks."""
LARGEST_BUCKET = 40_000_000
"""Elements that suffice to use a link to the full, whatever the layers' size: Megatron-LM's choice."""
SMALLEST_SHARE = 1 << 16
"""Elements a rank of a bucket: in fp32 a quarter MiB, which a link of 25 GB/s takes 10 us for, about its latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model and the batch are spread over ranks."""

    tp_size: int = field(
        default=1,
        metadata=option(
            "Tensor parallel: ranks that share each layer. Outside the linear layers they split the sequence (sequence "
            "parallelism). Keep it inside one host.",
            unit="ranks",
            minimum=1,
            maximum=LARGEST_SIZE,
        ),
    )
    num_sequence_chunks: int = field(
        default=1,
        metadata=option(
            "Chunks in which tensor-parallel ranks exchange their rows of the sequence, so that the exchanges run "
            "beneath the products of a layer, in forward and in backward. 1: each exchange alone, all rows at once. "
            "More chunks leave less in sight and make products smaller. Layers that multiply in FP8 have 1.",
            unit="chunks",
            minimum=1,
            maximum=LARGEST_SIZE,
        ),
    )
    pp_size: int = field(
        default=1,
        metadata=option(
            "Pipeline parallel: stages that the layers are cut into.", unit="stages", minimum=1, maximum=LARGEST_SIZE
        ),
    )
    dp_size: int = field(
        default=0,
        metadata=option(
            "Data parallel: replicas of the model. 0: the world size / (tp_size * pp_size).",
            unit="ranks",
            minimum=0,
            maximum=LARGEST_SIZE,
        ),
    )
    num_chunks: int = field(
        default=1,
        metadata=option(
            f"Model chunks on each stage; more than 1 with the {CHUNKED_NAMES} schedule only. They are of use without "
            "a pipeline, too: exchanges of data parallelism overlap, chunk by chunk, with the other chunks.",
            minimum=1,
            maximum=LARGEST_SIZE,
        ),
    )
    layers_per_chunk: tuple[int, ...] = field(
        default=(),
        metadata=option(
            "Layers of each of the pp_size * num_chunks chunks, in the model's order: from the one with the "
            "embedding to the one with the head. For stages that should take equally long although the loss costs "
            "as much as some layers do. The first and the last may have none. Empty: the even split.",
            unit="layers",
            minimum=0,
        ),
    )
    counts_embedding_as_layer: bool = field(
        default=False,
        metadata=option(
            "Whether the even split counts the embedding as a layer, so that the first chunk has one layer less than "
            "the others; num_layers and what is counted are then divided by pp_size * num_chunks."
        ),
    )
    counts_head_as_layer: bool = field(
        default=False,
        metadata=option("The same for the head with its loss: the last chunk has one layer less."),
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = field(
        default="1f1b",
        metadata=option(
            " ".join(["Order of the pipeline.", *(f"{kind.name}: {kind.summary}." for kind in KINDS.values())])
        ),
    )
    zero_stage: Literal[1, 2] = field(
        default=1,
        metadata=option(
            "What data-parallel ranks share. 1: the optimizer's state and master weights. 2: also the gradients."
        ),
    )
    overlap: bool = field(
        default=True,
        metadata=option("Whether communication overlaps with computation. Off gives the same numbers, bit by bit."),
    )
    has_aligned_reductions: bool = field(
        default=False,
        metadata=option(
            "Whether all stages start to reduce a chunk's gradients together, when the last of them is done with it: "
            "they are then slowed down by it at the same time, not one after the other. For pipelines of several "
            "chunks with zero_stage=1; what a stage reduces last, it reduces when it is done."
        ),
    )
    recompute: Literal["none", "selective", "full"] = field(
        default="none",
        metadata=option(
            "Activations computed again in backward instead of kept. selective: norms and the activation "
            "function of the MLP. full: whole blocks."
        ),
    )
    offload_layers: int = field(
        default=0,
        metadata=option(
            "Layers of each chunk, from its first, whose activations wait in host memory between forward and backward; "
            "a chunk of fewer layers offloads all. They travel while other layers compute: so the last layers of a "
            "chunk should stay. Saves GPU memory as "
            "recompute does, at the price of traffic to the host; both together move blocks' inputs only. Without a "
            "GPU it saves nothing.",
            unit="layers",
            minimum=0,
        ),
    )
    grad_reduce_dtype: Literal["fp32", "bf16"] = field(
        default="fp32",
        metadata=option("Type in which gradients travel between data-parallel ranks; they accumulate in fp32."),
    )
    bucket_size: int = field(
        default=0,
        metadata=option(
            "Parameters of a chunk that are reduced and gathered in one exchange, at least: a bucket is closed when it "
            "holds so many. 0: the matrices of one layer on a rank, at most 40,000,000 and at least 65,536 for each "
            "data-parallel rank.",
            unit="elements",
            minimum=0,
        ),
    )

    @property
    def schedule_kind(self) -> ScheduleKind:
        return KINDS[self.schedule]

    @property
    def placement(self) -> Placement:
        """Which stage holds which part of the model."""
        return self.schedule_kind.placement(self.pp_size, self.num_chunks)

    @property
    def layers_for_ends(self) -> tuple[int, int]:
        """As how many layers the even split counts the embedding and the head."""
        return int(self.counts_embedding_as_layer), int(self.counts_head_as_layer)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis that can be configured, as a layout is given it; dp_size may be 0 here."""
        return {axis.size_name: getattr(self, axis.size_name) for axis in configurable_axes()}

    @property
    def replica_sizes(self) -> dict[str, int]:
        """The sizes of the axes along which one replica of the model is spread."""
        return {name: size for name, size in self.sizes.items() if name != "dp_size"}

    @property
    def overlaps_by_bucket(self) -> bool:
        """Whether a chunk's gathers and reductions overlap with its own computes, bucket by bucket.

        Aligned reductions wait for the other stages.
        """
        return self.overlap and not self.has_aligned_reductions

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one replica of the model."""
        return prod(self.replica_sizes.values())

    def build_schedule(self, num_microbatches: int) -> Schedule:
        """Return what each stage does in a training step of so many micro-batches.

        Raises: TopologyError with the rule and the way out where there is no such pipeline.
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
        """Return what each stage does in an evaluation of so many micro-batches."""
        return forward_only(self.placement, num_microbatches, self._receives_ahead)

    @property
    def _receives_ahead(self) -> int:
        return 1 if self.overlap else 0


def configurable_axes() -> tuple[Axis, ...]:
    """Return the axes whose size is an option: those to which comm and parallel give a meaning."""
    options = {one.name for one in fields(ParallelConfig)}
    return tuple(axis for axis in SIZED_AXES if axis.size_name in options)
