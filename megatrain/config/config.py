"""The whole configuration: the sections, and the few values that follow from several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain.config.batch import BatchSchedule, BatchStage
from megatrain.config.data import DataSourceConfig
from megatrain.config.evaluation import ValidationSetConfig
from megatrain.config.model_size import block_weights
from megatrain.config.optimizer import ParameterGroupConfig
from megatrain.config.parallel import LARGEST_BUCKET, SMALLEST_SHARD
from megatrain.config.sections import Sections
from megatrain.config.stages import DataStageConfig, PlacedStage, placed_stages
from megatrain.config.step_sequence import StepSequence
from megatrain.contracts.errors import TopologyError
from megatrain.contracts.layout import Holders, Layout
from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.contracts.step_plan import Dealing
from megatrain.fencing.fence import FenceRule
from megatrain.fencing.phase_timeouts import PhaseTimeouts

_PART_OF_TIMEOUT = 0.9


class LayerKind(NamedTuple):
    """Whether a layer multiplies in FP8, and its window (ModelConfig.window_of)."""

    is_fp8: bool
    window_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Sections):
    """Everything that defines a run."""

    @property
    def resolved_lr_decay_steps(self) -> int:
        return self.optimizer.lr_decay_steps or self.train.steps

    @property
    def resolved_data_seed(self) -> int:
        return self.data.seed or self.train.seed

    @property
    def parameter_groups(self) -> tuple[ParameterGroupConfig, ...]:
        """The parameter groups that have a pattern, in order: the first that matches a parameter counts."""
        return tuple(group for group in self.sections_of("parameter_group").values() if group.pattern)

    @property
    def data_sources(self) -> Mapping[str, DataSourceConfig]:
        """The sources of training data by the key that selects them: data.train, data.pictures, pictures.shards, or the
        path or the pictures of each [[data_source]]."""
        if self.data.train:
            return {"data.train": DataSourceConfig(path=self.data.train, name="data.train")}
        if self.data.pictures != "none":
            key = "pictures.shards" if self.data.pictures == "shards" else "data.pictures"
            return {key: DataSourceConfig(pictures=self.data.pictures)}
        sections = self.sections_of("data_source").items()
        return {f"{name}.{'path' if one.path else 'pictures'}": one for name, one in sections if one.is_set}

    @property
    def data_stages(self) -> Sequence[DataStageConfig]:
        """The later stages of the run, in the order of their first samples."""
        stages = (stage for stage in self.sections_of("data_stage").values() if stage.has_effect)
        return sorted(stages, key=lambda stage: stage.after_tokens)

    @property
    def batch_schedule(self) -> BatchSchedule:
        """The global batch size of every step."""
        stages = (
            BatchStage(placed.first_sample, placed.stage.global_batch_size)
            for placed in self.placed_stages
            if placed.stage.global_batch_size
        )
        return BatchSchedule(self.batch, tuple(stages))

    @property
    def seq_len(self) -> int:
        """The tokens of a training sample until a data stage changes it; model.seq_len is the most that the model
        takes."""
        return self.data.seq_len or self.model.seq_len

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Every length of training samples in the run, in the order of the stages, each once."""
        return tuple(dict.fromkeys((self.seq_len, *(placed.seq_len for placed in self.placed_stages))))

    @property
    def evaluation_seq_len(self) -> int:
        """The tokens of a held-out sample."""
        return self.evaluation.seq_len or self.seq_len

    @property
    def placed_stages(self) -> tuple[PlacedStage, ...]:
        """The later stages of the run, with their first samples and the lengths of their samples."""
        return placed_stages(self.data_stages, self.batch, self.seq_len)

    @property
    def validation_sets(self) -> Mapping[str, ValidationSetConfig]:
        """The sets of held-out data by the key that selects them: data.validation, or the path or the pictures of each
        [[validation_set]]."""
        if self.data.validation:
            return {"data.validation": ValidationSetConfig(path=self.data.validation, name="data.validation")}
        return {
            f"{name}.{'path' if validation_set.path else 'pictures'}": validation_set
            for name, validation_set in self.sections_of("validation_set").items()
            if validation_set.is_set
        }

    @property
    def phase_timeouts(self) -> PhaseTimeouts:
        """How long the ranks of this run may make no progress before they count as hung.

        The configured limits are shorter than the timeouts of collectives, so that a hung rank can still be
        distinguished from the ranks that wait for it. The limit of a step follows from the measured steps.
        """
        return PhaseTimeouts(
            init_s=_PART_OF_TIMEOUT * self.runtime.init_timeout_s,
            first_step_s=_PART_OF_TIMEOUT * self.runtime.first_step_timeout_s,
            checkpoint_s=_PART_OF_TIMEOUT * self.runtime.checkpoint_timeout_s,
            evaluation_s=_PART_OF_TIMEOUT * self.runtime.evaluation_timeout_s,
            floor_s=self.recovery.hang_floor_s,
            factor=self.recovery.hang_factor,
        )

    @property
    def fence_rule(self) -> FenceRule:
        """How long the workers of this run may outlive the lease of their host."""
        return FenceRule(
            lease_ttl_s=self.recovery.lease_ttl_s,
            floor_s=self.recovery.hang_floor_s,
            join_timeout_s=self.recovery.join_timeout_s,
            save_grace_s=self.runtime.save_grace_s,
        )

    def layout(self, world_size: int | None) -> Layout:
        """Return the sizes of the mesh; without a world size, dp_size = 0 counts as 1.

        Raises: TopologyError when the sizes do not multiply to `world_size`.
        """
        parallel = self.parallel
        dp_size = parallel.dp_size or max(1, (world_size or 1) // parallel.ranks_per_replica)
        layout = Layout(**{**parallel.sizes, "dp_size": dp_size})
        if world_size is not None and layout.world_size != world_size:
            raise TopologyError(
                f"{layout} needs {layout.world_size} ranks, but there are {world_size}; start {layout.world_size} "
                f"processes or change one of parallel.{', '.join(layout.sizes)}"
            )
        return layout

    @property
    def holders(self) -> tuple[Holders, ...]:
        """The groups of tp ranks that hold the same key-value head. Empty if no head is on several ranks."""
        num_heads, tp_size = self.model.resolved_num_kv_heads, self.parallel.tp_size
        return (Holders("tp", num_heads),) if num_heads < tp_size else ()

    def dealing(self, layout: Layout, global_batch_size: int | None = None) -> Dealing:
        """Return how a step is dealt to the replicas. global_batch_size: None means the configured size."""
        samples = self.batch.global_batch_size if global_batch_size is None else global_batch_size
        parallel = self.parallel
        return Dealing(
            samples // self.batch.micro_batch_size,
            layout.num_sample_parts,
            parallel.schedule_kind.least_microbatches(parallel.pp_size),
            has_equal_slots=parallel.zero_stage == 2,
        )

    def num_microbatches(self, layout: Layout, global_batch_size: int | None = None) -> int:
        """Return the number of micro-batches, empty ones included, of the pipeline that computes the most in one step.

        global_batch_size: None means the configured size.
        """
        return self.dealing(layout, global_batch_size).max_slots

    def steps(self, layout: Layout, cursor: int, num_steps: int, skipped: SampleRanges = ()) -> StepSequence:
        """Return the plans of `num_steps` steps from sample `cursor` on, the same on all ranks."""
        return StepSequence(self.batch_schedule, self.dealing(layout), cursor, num_steps, skipped)

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """How many layers each chunk holds, in the model's order: parallel.layers_per_chunk, or the even split."""
        parallel = self.parallel
        if parallel.layers_per_chunk:
            return parallel.layers_per_chunk
        num_chunks, (embedding, head) = parallel.placement.num_parts, parallel.layers_for_ends
        layers = [(self.model.num_layers + embedding + head) // num_chunks] * num_chunks
        layers[0] -= embedding
        layers[-1] -= head
        return tuple(layers)

    def layers_of(self, stage: int, chunk: int) -> range:
        """Return the layers that chunk `chunk` of `stage` holds; no other function computes this."""
        layers, number = self.layers_per_chunk, self.parallel.placement.model_chunk(stage, chunk)
        first = sum(layers[:number])
        return range(first, first + layers[number])

    def layer_kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer. Layers of the same kind compute alike and need the same memory."""
        return LayerKind(self.fp8.covers(layer), self.model.window_of(layer))

    def bucket_size(self, layout: Layout) -> int:
        """Return the number of elements at which a bucket is closed: parallel.bucket_size, or a default for the model.

        The default is the size of one layer's matrices on a rank: with N layers, only 1/N of the communication is
        exposed, because each collective overlaps with a layer. It is limited to LARGEST_BUCKET, which suffices to use a
        link fully. But it is never less than SMALLEST_SHARD per rank of the replica group: below that, latency costs
        more than bandwidth.
        """
        if self.parallel.bucket_size:
            return self.parallel.bucket_size
        layer = block_weights(self.model) // self.parallel.tp_size
        return max(min(layer, LARGEST_BUCKET), SMALLEST_SHARD * layout.replica_group_size)
