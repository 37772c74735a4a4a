"""Lay a job out on all its ranks in one process, without a GPU and without memory for weights.

The world group is torch's `fake` backend at the job's full size, on which the real mesh is created for one rank of each
kind of stage (with the embedding, in the middle, with the head); the rank's chunks are built on meta. What comes out is
what these ranks would hold. Middle stages whose chunks have as many layers, of the same kinds, are alike but for the
micro-batches in flight: the first of them has most, or the last, where what it puts off is more than what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.comm import Mesh, dry_mesh
from megatrain.config.config import Config
from megatrain.config.model_size import num_parameters
from megatrain.contracts.layout import Layout
from megatrain.planning.chunks import plan_stage
from megatrain.planning.memory import RankMemory, estimate_memory
from megatrain.schedule import bubble_fraction
from megatrain.telemetry.flops import training_flops_per_token

_NUM_SAVED = 3
"""Tensors of a parameter in a checkpoint: master weight and both moments."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One kind of process group: how many there are of it, and the one of the example's rank."""

    name: str
    size: int
    num_groups: int
    example_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a rank of a stage holds. `stages`: those which the numbers stand for; `rank` is of the first of them."""

    name: str
    stages: tuple[int, ...]
    rank: int
    layers: tuple[tuple[int, ...], ...]
    """Of each chunk."""
    num_parameters: int
    """Elements on one rank, without padding."""
    memory: RankMemory
    """Of the fullest stage."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A job on all its ranks."""

    job: str
    layout: Layout
    schedule: str
    num_chunks: int
    num_microbatches: int
    micro_batch_size: int
    bucket_size: int
    """Elements at least, of gradients or parameters that are exchanged together."""
    by_chunk: str
    """Why exchanges of data parallelism overlap with other chunks only; empty where they do so bucket by bucket."""
    bubble_fraction: float
    num_parameters: int
    """Of the whole model."""
    checkpoint_bytes: int
    """Of weights and two moments, in full precision."""
    num_tokens_per_step: int
    flops_per_token: float
    groups: tuple[GroupPlan, ...]
    stages: tuple[StagePlan, ...]

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.num_tokens_per_step

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON knows it."""
        stages = [
            {**asdict(stage), "memory": {**asdict(stage.memory), "total": stage.memory.total}} for stage in self.stages
        ]
        return {
            **asdict(self),
            "layout": self.layout.sizes,
            "world_size": self.layout.world_size,
            "flops_per_step": self.flops_per_step,
            "stages": stages,
        }


def plan_run(config: Config) -> RunPlan:
    """Return what every rank would hold. An open parallel.dp_size counts as 1.

    Raises: TopologyError when layout, tensor plan or schedule cannot be built.
    """
    layout, parallel = config.layout(None), config.parallel
    num_microbatches = config.num_microbatches(layout.dp_size)
    groups: dict[str, GroupPlan] = {}
    stages = []
    for name, alike in _stage_kinds(config):
        rank = layout.rank_of({"pp": alike[0]})
        with dry_mesh(layout, rank, has_wrap_links=parallel.num_chunks > 1, neighbours=config.neighbours) as mesh:
            for group in _group_plans(mesh):
                groups.setdefault(group.name, group)
            chunks = plan_stage(config, mesh)
        stages.append(
            StagePlan(
                name=name,
                stages=alike,
                rank=rank,
                layers=tuple(tuple(chunk.part.layers) for chunk in chunks),
                num_parameters=sum(chunk.num_parameters for chunk in chunks),
                memory=max(
                    (estimate_memory(config, layout, stage, chunks) for stage in dict.fromkeys((alike[0], alike[-1]))),
                    key=lambda memory: memory.total,
                ),
            )
        )
    return RunPlan(
        job=config.job.name,
        layout=layout,
        schedule=parallel.schedule,
        num_chunks=parallel.num_chunks,
        num_microbatches=num_microbatches,
        micro_batch_size=config.batch.micro_batch_size,
        bucket_size=config.bucket_size(layout.dp_size),
        by_chunk=_by_chunk(config),
        bubble_fraction=bubble_fraction(parallel.schedule, layout.pp_size, parallel.num_chunks, num_microbatches),
        num_parameters=num_parameters(config.model),
        checkpoint_bytes=_NUM_SAVED * (8 if config.train.precision == "fp64" else 4) * num_parameters(config.model),
        num_tokens_per_step=config.batch.global_batch_size * config.model.seq_len,
        flops_per_token=training_flops_per_token(config.model),
        groups=tuple(groups.values()),
        stages=tuple(stages),
    )


def _by_chunk(config: Config) -> str:
    if config.kernels.cuda_graphs:
        return "kernels.cuda_graphs=true: a replayed backward tells of no gradient"
    if config.parallel.has_aligned_reductions:
        return "parallel.has_aligned_reductions=true: stages reduce together"
    return "" if config.parallel.overlap else "parallel.overlap=false: nothing overlaps"


def _stage_kinds(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the stages that are alike, with a name for them. Middle ones of several kinds are told by their layers."""
    pp_size = config.parallel.pp_size
    if pp_size == 1:
        yield "all layers", (0,)
        return
    yield "embedding", (0,)
    middle: dict[tuple[tuple[bool, ...], ...], list[int]] = {}
    for stage in range(1, pp_size - 1):
        middle.setdefault(_layers_by_kind(config, stage), []).append(stage)
    for kind, stages in middle.items():
        layers = "+".join(str(len(of_chunk)) for of_chunk in kind)
        yield "middle" if len(middle) == 1 else f"middle, layers {layers}", tuple(stages)
    yield "head", (pp_size - 1,)


def _layers_by_kind(config: Config, stage: int) -> tuple[tuple[bool, ...], ...]:
    """Return for each chunk of the stage whether each of its layers multiplies in FP8."""
    return tuple(
        tuple(config.fp8.covers(layer) for layer in config.layers_of(stage, chunk))
        for chunk in range(config.parallel.num_chunks)
    )


def _group_plans(mesh: Mesh) -> Iterator[GroupPlan]:
    """Yield this rank's groups; those of one rank are no process groups."""
    world_size = mesh.layout.world_size
    for group in mesh.groups:
        if group.size == 1:
            continue
        # every kind partitions the ranks that take part in it: all, or those of the first and last stage
        num_members = 2 * world_size // mesh.layout.pp_size if group.name == "embedding" else world_size
        yield GroupPlan(group.name, group.size, num_members // group.size, group.ranks)
