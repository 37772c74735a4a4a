"""Plans a job on all its ranks in one process, without a GPU and without memory for weights.

A mesh without peers (comm/dry.py) is built in the job's full world for one rank of each kind of stage (with the
embedding, in the middle, with the head), and the rank's chunks are built on meta. The result is what these ranks would
hold. Middle stages with the same layers per chunk, of the same kinds, differ only in the micro-batches in flight and in
the deferred wgrads. The first of these stages needs the most memory, or the last if the operands of deferred wgrads
take more than the activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatrain.comm import Mesh
from megatrain.config.config import Config, LayerKind
from megatrain.config.model_size import block_weights, num_parameters
from megatrain.config.picture_share import picture_share
from megatrain.contracts.layout import Layout
from megatrain.contracts.step_plan import idle_text
from megatrain.planning.chunks import plan_stage, planned_mesh, replays_graphs
from megatrain.planning.memory import RankMemory, estimate_memory, message_bytes
from megatrain.planning.parameter_groups import GroupedParameters, grouped_parameters
from megatrain.planning.traffic import Traffic, stage_traffic
from megatrain.planning.update import plan_update
from megatrain.schedule import bubble_fraction
from megatrain.telemetry.flops import training_flops_per_token


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One kind of process group: the number of such groups, and the ranks of one of them."""

    name: str
    size: int
    num_groups: int
    example_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a rank of a stage holds. `stages`: all stages of this kind; `rank` is in the first of them."""

    name: str
    stages: tuple[int, ...]
    rank: int
    layers: tuple[tuple[int, ...], ...]
    """The layers of each chunk."""
    num_parameters: int
    """Elements on one rank, without padding."""
    memory: RankMemory
    """The memory of the stage that needs most."""
    traffic: tuple[Traffic, ...]
    """What a rank sends in a step."""


@dataclass(frozen=True, slots=True)
class LaterPlan:
    """The same job from a stage of its data on, in which steps have another batch, or samples another length.

    first_step: the number of steps of a new run before this stage.
    """

    after_tokens: int
    first_step: int
    plan: RunPlan


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A job on all its ranks, in steps of `global_batch_size` samples of `seq_len` tokens.

    later: the stages with other batches or lengths.
    """

    job: str
    layout: Layout
    schedule: str
    num_chunks: int
    num_microbatches: int
    micro_batch_size: int
    idle_share: float
    """The share of the slots of all pipelines that have no micro-batch: see Dealing.idle_share."""
    idle: str
    """The same as text; empty if no slot is idle."""
    bucket_size: int
    """The number of elements at which a bucket is closed. One collective exchanges the gradients or parameters of a
    bucket."""
    by_chunk: str
    """Why collectives of data parallelism overlap only with other chunks; empty if they overlap bucket by bucket."""
    bubble_fraction: float
    num_parameters: int
    """Parameters of the whole model."""
    checkpoint_bytes: int
    """Bytes of weights and optimizer state, in full precision."""
    global_batch_size: int
    seq_len: int
    num_tokens_per_step: int
    flops_per_token: float
    grouped_parameters: tuple[GroupedParameters, ...]
    """All parameters by parameter group and update rule."""
    groups: tuple[GroupPlan, ...]
    stages: tuple[StagePlan, ...]
    later: tuple[LaterPlan, ...] = ()

    @property
    def largest_stage(self) -> StagePlan:
        """The kind of stage whose ranks need the most memory."""
        return max(self.stages, key=lambda stage: stage.memory.total)

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.num_tokens_per_step

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as values for JSON."""
        stages = [
            {**asdict(stage), "memory": {**asdict(stage.memory), "total": stage.memory.total}} for stage in self.stages
        ]
        return {
            **asdict(self),
            "layout": self.layout.sizes,
            "world_size": self.layout.world_size,
            "flops_per_step": self.flops_per_step,
            "stages": stages,
            "later": [{**asdict(one), "plan": one.plan.to_dict()} for one in self.later],
        }


def plan_run(config: Config) -> RunPlan:
    """Return what every rank would hold, in each stage of the data. With parallel.dp_size=0, one replica is assumed.

    Raises: TopologyError when layout, tensor plan or schedule cannot be built.
    """
    schedule = config.batch_schedule
    placed = [one for one in config.placed_stages if one.stage.global_batch_size or one.changes_length]
    sizes = [(config.batch.global_batch_size, config.seq_len, picture_share(config))]
    for one in placed:
        size = one.stage.global_batch_size or sizes[-1][0]
        sizes.append((size, one.seq_len, picture_share(config, one.first_sample)))
    plans = {size: _plan_steps(config, *size) for size in dict.fromkeys(sizes)}
    later = tuple(
        LaterPlan(one.stage.after_tokens, schedule.steps_before(one.first_sample), plans[size])
        for one, size in zip(placed, sizes[1:], strict=True)
    )
    return replace(plans[sizes[0]], later=later)


def _plan_steps(whole: Config, global_batch_size: int, seq_len: int, pictures_per_sample: float) -> RunPlan:
    """Return the plan of a job whose steps all have this size, and its samples this length.

    pictures_per_sample: the share of the samples with a picture. It changes the FLOPs, but not the memory: that of a
    micro-batch in which each sample has a picture.
    """
    config = replace(
        whole,
        batch=replace(whole.batch, global_batch_size=global_batch_size),
        data=replace(whole.data, seq_len=seq_len),
    )
    layout, parallel = config.layout(None), config.parallel
    dealing = config.dealing(layout)
    num_microbatches = dealing.max_slots
    groups: dict[str, GroupPlan] = {}
    stages, largest_chunk = [], 0
    for name, alike in _stage_kinds(config):
        rank = layout.first_rank_of(alike[0])
        with planned_mesh(config, layout, rank) as mesh:
            for group in _group_plans(mesh):
                groups.setdefault(group.name, group)
            chunks = plan_stage(config, mesh)
            update = plan_update(config, mesh, chunks)
        largest_chunk = max(largest_chunk, *(chunk.num_parameters for chunk in chunks))
        stages.append(
            StagePlan(
                name=name,
                stages=alike,
                rank=rank,
                layers=tuple(tuple(chunk.part.layers) for chunk in chunks),
                num_parameters=sum(chunk.num_parameters for chunk in chunks),
                memory=max(
                    (
                        estimate_memory(config, layout, stage, chunks, update)
                        for stage in dict.fromkeys((alike[0], alike[-1]))
                    ),
                    key=lambda memory: memory.total,
                ),
                traffic=stage_traffic(
                    config,
                    chunks,
                    parallel.build_schedule(num_microbatches).stages[alike[0]],
                    message_bytes(config, layout),
                    update,
                ),
            )
        )
    grouped = grouped_parameters(config)
    return RunPlan(
        job=config.job.name,
        layout=layout,
        schedule=parallel.schedule,
        num_chunks=parallel.num_chunks,
        num_microbatches=num_microbatches,
        micro_batch_size=config.batch.micro_batch_size,
        idle_share=dealing.idle_share,
        idle=idle_text(dealing),
        bucket_size=config.bucket_size(layout),
        by_chunk=_by_chunk(config, config.bucket_size(layout), largest_chunk),
        bubble_fraction=bubble_fraction(parallel.schedule, layout.pp_size, parallel.num_chunks, num_microbatches),
        num_parameters=num_parameters(config.model),
        checkpoint_bytes=(8 if config.train.precision == "fp64" else 4)
        * sum(group.num_parameters * (1 + len(group.rule.state_kinds)) for group in grouped),
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        num_tokens_per_step=global_batch_size * seq_len,
        flops_per_token=training_flops_per_token(
            replace(config.model, seq_len=seq_len), pictures_per_sample=pictures_per_sample
        ),
        grouped_parameters=grouped,
        groups=tuple(groups.values()),
        stages=tuple(stages),
    )


def _by_chunk(config: Config, bucket_size: int, largest_chunk: int) -> str:
    """Return why a chunk's buckets are exchanged together, or an empty text.

    bucket_size: elements that close a bucket. largest_chunk: the most parameters that a rank holds of one chunk.
    """
    if replays_graphs(config):
        return "kernels.cuda_graphs=true: a replayed backward does not report when a gradient is complete"
    if config.parallel.has_aligned_reductions:
        return "parallel.has_aligned_reductions=true: stages reduce together"
    if not config.parallel.overlap:
        return "parallel.overlap=false: nothing overlaps"
    if bucket_size >= largest_chunk:
        layer = block_weights(config.model) // config.parallel.tp_size
        return f"one bucket holds a whole chunk; parallel.bucket_size={layer} is the size of a layer's matrices"
    return ""


def _stage_kinds(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each kind of stage: its name, and its stages. Middle stages of several kinds are named by their layers."""
    pp_size = config.parallel.pp_size
    if pp_size == 1:
        yield "all layers", (0,)
        return
    yield "embedding", (0,)
    middle: dict[tuple[tuple[LayerKind, ...], ...], list[int]] = {}
    for stage in range(1, pp_size - 1):
        middle.setdefault(_layers_by_kind(config, stage), []).append(stage)
    for kind, stages in middle.items():
        layers = "+".join(str(len(of_chunk)) for of_chunk in kind)
        yield "middle" if len(middle) == 1 else f"middle, layers {layers}", tuple(stages)
    yield "head", (pp_size - 1,)


def _layers_by_kind(config: Config, stage: int) -> tuple[tuple[LayerKind, ...], ...]:
    """Return the kind of each layer of each chunk of the stage."""
    return tuple(
        tuple(config.layer_kind(layer) for layer in config.layers_of(stage, chunk))
        for chunk in range(config.parallel.num_chunks)
    )


def _group_plans(mesh: Mesh) -> Iterator[GroupPlan]:
    """Yield this rank's groups, except groups of one rank, which need no process group."""
    world_size = mesh.layout.world_size
    for group in mesh.groups:
        if group.size == 1:
            continue
        # the groups of every kind partition their ranks: all ranks, or the ranks of the first and the last stage
        num_members = 2 * world_size // mesh.layout.pp_size if group.name == "embedding" else world_size
        yield GroupPlan(group.name, group.size, num_members // group.size, group.ranks)
