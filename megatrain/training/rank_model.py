"""Assembles one rank's part of the job: model chunks, tensor plan, buckets, pipeline, optimizer.

The model is built on the meta device and sharded before it gets memory, so no rank ever holds more than its part.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

import torch

from megatrain.checkpoint.load import FP8_HISTORY
from megatrain.checkpoint.ownership import SavedShard
from megatrain.chunks.builder import BuiltChunk, build_chunks
from megatrain.chunks.inputs import InputCopies, pipeline_input
from megatrain.comm import Mesh
from megatrain.comm.sequence import gather_columns
from megatrain.config.config import Config
from megatrain.contracts.layout import STAGES
from megatrain.data.microbatch import MicroBatch
from megatrain.model import PatchRows, TokenContext, initialize_
from megatrain.model.fp8 import Fp8Scales
from megatrain.model.head import CustomLoss
from megatrain.ops.cross_entropy import write_sample_losses
from megatrain.ops.documents import pack_documents
from megatrain.ops.precision import DTYPES
from megatrain.optim import ShardedOptimizer
from megatrain.parallel.boxes import Box
from megatrain.parallel.data_parallel import ChunkDataParallel
from megatrain.parallel.graphed_chunk import Capture, CudaGraphCapture, GraphedChunk
from megatrain.parallel.offload import CudaCopies, ImmediateCopies
from megatrain.parallel.pipeline import Pipeline, PipelineChunk, PipelineInput
from megatrain.parallel.placement import ShardHolders
from megatrain.parallel.sharding import FlatShard
from megatrain.telemetry.recorder import Recorder
from megatrain.training.extensions import Loss


@dataclass(frozen=True, slots=True)
class RankModel:
    """One rank's part of the model and its shards of the optimizer."""

    config: Config
    mesh: Mesh
    device: torch.device
    pipeline: Pipeline
    data_parallel: tuple[ChunkDataParallel, ...]
    optimizer: ShardedOptimizer
    input_copies: InputCopies
    fp8_scales: tuple[Fp8Scales, ...] = ()

    def initialize(self) -> None:
        """Draw the initial weights. Every rank draws its own shards; the numbers are the same in every layout."""
        for kind, shard, _ in self.optimizer.flat_shards():
            if kind == "master":
                initialize_(
                    shard.tensor,
                    shard.name,
                    self.config.model,
                    self.config.train.seed,
                    shard.global_shape,
                    shard.box.offsets,
                )
        self.optimizer.begin_averages()
        self.optimizer.copy_to_parameters()

    def saved_shards(self) -> list[SavedShard]:
        """Return all state of this rank in the form of a checkpoint, including state that other ranks hold too."""
        saved = [SavedShard(kind, shard) for _, state in self.optimizer.states for kind, shard in state.flat_shards()]
        return saved + self._saved_histories()

    def _saved_histories(self) -> list[SavedShard]:
        """Return the histories of the FP8 scales, which are the same on all ranks of a stage."""
        count = self.mesh.layout.stride(STAGES)
        holders = ShardHolders(("stage",), self.mesh.rank % count, count)
        saved = []
        for scales in self.fp8_scales:
            for name, history in scales.histories():
                shape = tuple(history.shape)
                shard = FlatShard(name, shape, Box((0, 0), shape), history, holders)
                saved.append(SavedShard(FP8_HISTORY, shard))
        return saved

    def refresh_derived_state(self) -> None:
        """Update everything that is derived from the state, after a checkpoint was read into it."""
        self.optimizer.copy_to_parameters()
        for scales in self.fp8_scales:
            scales.scaling.refresh()

    def advance_fp8_scales(self) -> None:
        """End a step of delayed scaling: all ranks of a stage continue with the largest magnitudes of any of them.

        Communication: a maximum of one number per slot over the stage.
        """
        for scales in self.fp8_scales:
            self.mesh.reduce_over_stage(scales.scaling.collected_P, maximum=True)
            scales.scaling.advance()

    def pipeline_input(self, tokens_SB: torch.Tensor, labels_SB: torch.Tensor, sample_B: torch.Tensor,
                       document_SB: torch.Tensor | None,
                       pictures: PatchRows | None = None) -> PipelineInput:  # fmt: skip
        """Return the pipeline's input on this rank's device for a micro-batch on the CPU."""
        documents = None if document_SB is None else pack_documents(document_SB)
        return pipeline_input(self.mesh.tp, self.input_copies, tokens_SB, labels_SB, sample_B, documents, pictures)

    def input_of(self, micro: MicroBatch) -> PipelineInput:
        """Return the pipeline's input on this rank's device for a micro-batch of the data."""
        pictures = None
        if micro.patches_PKC is not None and micro.picture_place_K is not None:
            pictures = PatchRows(torch.from_numpy(micro.patches_PKC), torch.from_numpy(micro.picture_place_K))
        return self.pipeline_input(
            torch.from_numpy(micro.tokens_SB),
            torch.from_numpy(micro.labels_SB),
            torch.from_numpy(micro.sample_B),
            None if micro.document_SB is None else torch.from_numpy(micro.document_SB),
            pictures,
        )

    def set_training(self, is_training: bool) -> None:
        """Switch dropout on or off."""
        for chunk in self.pipeline.chunks:
            chunk.module.train(is_training)


def build_rank_model(
    config: Config,
    mesh: Mesh,
    recorder: Recorder,
    device: torch.device,
    capture: Capture | None = None,
    loss: Loss | None = None,
) -> RankModel:
    """Build this rank's chunks, pipeline and optimizer. Weights are zero until they are initialized or loaded.

    capture: captures micro-batches as CUDA graphs; None: the result of `capture_of`. loss: replaces cross entropy in
    training; the configuration must allow it (Extensions.problems). A custom loss returns only a sum, so a run with
    several sources has no losses of samples, and reports no loss by source.
    """
    capture = capture or capture_of(config, device)
    built = build_chunks(config, mesh, device, CudaCopies(device) if device.type == "cuda" else ImmediateCopies())
    if loss is not None:
        for chunk in built:
            head = chunk.meta.module.loss_head
            if head is not None:
                gather = partial(gather_columns, group=mesh.tp)
                head.cross_entropy = CustomLoss(loss, config.model.vocab_size, head.cross_entropy, gather)
    chunks = [_as_trained(config, chunk, capture) for chunk in built]
    if loss is None and len(config.data_sources) > 1:
        chunks = [
            replace(pipeline_chunk, sample_losses_B=_keep_sample_losses(config, chunk, device))
            for pipeline_chunk, chunk in zip(chunks, built, strict=True)
        ]
    pipeline = Pipeline(
        mesh,
        chunks,
        recorder,
        hidden_size=config.model.hidden_size,
        dtype=DTYPES[config.train.precision],
        device=device,
    )
    data_parallel = tuple(chunk.data_parallel for chunk in built)
    optimizer = ShardedOptimizer(data_parallel, config.optimizer, mesh)
    scales = tuple(chunk.fp8_scales for chunk in built if chunk.fp8_scales is not None)
    return RankModel(config, mesh, device, pipeline, data_parallel, optimizer, InputCopies.to(device), scales)


def capture_of(config: Config, device: torch.device) -> Capture | None:
    """Return what captures micro-batches as CUDA graphs; None without kernels.cuda_graphs or a GPU."""
    return CudaGraphCapture() if config.kernels.cuda_graphs and device.type == "cuda" else None


def _as_trained(config: Config, chunk: BuiltChunk, capture: Capture | None) -> PipelineChunk:
    """Return the chunk as the pipeline runs it; with `capture` it replays the CUDA graphs of captured micro-batches.

    A replay runs no hook when a gradient is written or a parameter is used, so overlap by bucket works only without
    graphs.
    """
    plain = chunk.pipeline_chunk
    if capture is None:
        if config.parallel.overlaps_by_bucket:
            plain.data_parallel.overlap_by_bucket(chunk.meta.module)
        return plain
    graphs = GraphedChunk(plain.forward, plain.data_parallel, capture, partial(_decisions, chunk))
    return replace(plain, graphs=graphs)


def _keep_sample_losses(config: Config, chunk: BuiltChunk, device: torch.device) -> torch.Tensor | None:
    """Make the chunk write the loss of each sample to the result, if it computes losses. Shapes: result [B].

    The memory is the same in every forward, so a captured graph can write to it too.
    """
    head = chunk.meta.module.loss_head
    if head is None:
        return None
    assert not isinstance(head.cross_entropy, CustomLoss)
    losses_B = torch.zeros(config.batch.micro_batch_size, dtype=torch.float64, device=device)
    head.cross_entropy.observe = partial(write_sample_losses, losses_B)
    return losses_B


def _decisions(chunk: BuiltChunk, context: TokenContext) -> Hashable:
    """Return the values that change during training and on which the model's Python code branches.

    A graph is captured for each combination of these values: docs/adr/0029.
    """
    scales = chunk.fp8_scales
    num_pictures = 0 if context.pictures is None else len(context.pictures.place_K)
    return chunk.meta.module.training, scales is not None and scales.scaling.is_primed, num_pictures
