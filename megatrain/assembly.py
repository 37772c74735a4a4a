"""Put one rank's share of the job together: model chunks, tensor plan, buckets, pipeline, optimizer.

The model is built on the meta device, cut, and only then given memory, so no rank ever holds more than its share.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from megatrain.checkpoint.load import FP8_HISTORY
from megatrain.checkpoint.ownership import SavedShard
from megatrain.comm import Mesh
from megatrain.config.config import Config
from megatrain.contracts.operations import Operation
from megatrain.model import TokenContext, initialise_
from megatrain.model.fp8 import Fp8Scales, use_fp8
from megatrain.model.norm import use_norms
from megatrain.ops.documents import pack_documents
from megatrain.ops.precision import DTYPES, accumulate_dtype
from megatrain.optim import ShardedOptimizer
from megatrain.parallel.data_parallel import ChunkDataParallel, DataParallelOptions
from megatrain.parallel.graphed_chunk import Capture, CudaGraphCapture, GraphedChunk
from megatrain.parallel.offload import CudaCopies, ImmediateCopies, Offloader
from megatrain.parallel.pipeline import Pipeline, PipelineChunk, PipelineInput
from megatrain.parallel.recompute import recompute_fully
from megatrain.parallel.sharding import Box, FlatShard
from megatrain.planning.meta_chunk import MetaChunk, build_meta_chunks
from megatrain.telemetry.recorder import Recorder

SMALLEST_ACTIVATION_WIDTH = 16
"""Numbers a token of what is worth a way to host memory; a norm keeps one or two for backward."""


@dataclass(frozen=True, slots=True)
class Replica:
    """This rank's share of the model and of the optimizer."""

    config: Config
    mesh: Mesh
    device: torch.device
    pipeline: Pipeline
    data_parallel: tuple[ChunkDataParallel, ...]
    optimizer: ShardedOptimizer
    fp8_scales: tuple[Fp8Scales, ...] = ()

    def initialise(self) -> None:
        """Draw the initial weights: every rank its own shards, the same numbers in every layout."""
        for kind, shard, _ in self.optimizer.flat_shards():
            if kind == "master":
                initialise_(
                    shard.tensor,
                    shard.name,
                    self.config.model,
                    self.config.train.seed,
                    shard.global_shape,
                    shard.box.offsets,
                )
        self.optimizer.publish()

    def saved_shards(self) -> list[SavedShard]:
        """Return all state of this rank as a checkpoint has it, with what other ranks hold alike."""
        saved = []
        for _, state in self.optimizer.states:
            group = state.bucket.sum_group
            axes, index, copies = ((), 0, 1) if group is None else ((group.name,), group.rank, group.size)
            saved += [SavedShard(kind, shard, axes, index, copies) for kind, shard in state.flat_shards()]
        return saved + self._saved_histories()

    def _saved_histories(self) -> list[SavedShard]:
        """Scales of FP8 are the same on all ranks of a stage."""
        dp, tp = self.mesh.dp, self.mesh.tp
        index, copies = dp.rank * tp.size + tp.rank, dp.size * tp.size
        saved = []
        for scales in self.fp8_scales:
            for name, history in scales.histories():
                shape = tuple(history.shape)
                shard = FlatShard(name, shape, Box((0, 0), shape), history)
                saved.append(SavedShard(FP8_HISTORY, shard, (dp.name, tp.name), index, copies))
        return saved

    def state_loaded(self) -> None:
        """Take what follows from the state that a checkpoint was read into."""
        self.optimizer.publish()
        for scales in self.fp8_scales:
            scales.scaling.refresh()

    def advance_fp8_scales(self) -> None:
        """End a step of delayed scaling: all ranks of a stage go on with the largest magnitudes that any of them saw.

        Communication: one number a slot over dp and over tp.
        """
        for scales in self.fp8_scales:
            collected_P = scales.scaling.collected_P
            self.mesh.dp.all_reduce(collected_P, Operation.DP_ALL_REDUCE, maximum=True).wait()
            self.mesh.tp.all_reduce(collected_P, Operation.TP_ALL_REDUCE, maximum=True).wait()
            scales.scaling.advance()

    def pipeline_input(self, tokens_SB: torch.Tensor, labels_SB: torch.Tensor, sample_B: torch.Tensor,
                       document_SB: torch.Tensor | None) -> PipelineInput:  # fmt: skip
        """Return a micro-batch, which is on the CPU, as the pipeline takes it, on this rank's device."""
        seq_len = tokens_SB.shape[0]
        tp = self.mesh.tp
        context = TokenContext(
            sample_B=sample_B.to(self.device, non_blocking=True),
            seq_len=seq_len,
            documents=None if document_SB is None else pack_documents(document_SB).to(self.device),
            token_offset=tp.rank * (seq_len // tp.size),
        )
        return PipelineInput(
            tokens_SB.to(self.device, non_blocking=True), labels_SB.to(self.device, non_blocking=True), context
        )

    def set_training(self, is_training: bool) -> None:
        """Switch dropout on or off."""
        for chunk in self.pipeline.chunks:
            chunk.module.train(is_training)


def build_replica(
    config: Config, mesh: Mesh, recorder: Recorder, device: torch.device, capture: Capture | None = None
) -> Replica:
    """Build this rank's chunks and everything around them. Weights are zero until initialised or loaded.

    capture: makes recordings of micro-batches; by default that of the configuration and the device.
    """
    capture = capture or capture_of(config, device)
    dtype = DTYPES[config.train.precision]
    gradient_dtype = accumulate_dtype(dtype)
    options = DataParallelOptions(
        zero_stage=config.parallel.zero_stage,
        dtype=dtype,
        gradient_dtype=gradient_dtype,
        reduce_dtype=torch.bfloat16 if config.parallel.grad_reduce_dtype == "bf16" else gradient_dtype,
        bucket_size=config.parallel.bucket_size,
        has_overlap=config.parallel.overlap,
    )
    fp8_scales: list[Fp8Scales] = []
    metas = build_meta_chunks(config, mesh.layout, mesh.coordinate.pp, mesh.tp)
    chunks = [
        _build_chunk(config, mesh, number, meta, options, device, fp8_scales, capture)
        for number, meta in enumerate(metas)
    ]
    if config.parallel.offload_layers:
        _offload_activations(config, mesh, metas, device)
    pipeline = Pipeline(
        mesh,
        chunks,
        recorder,
        hidden_shape=(
            config.model.seq_len // mesh.layout.tp_size,
            config.batch.micro_batch_size,
            config.model.hidden_size,
        ),
        dtype=dtype,
        device=device,
    )
    data_parallel = tuple(chunk.data_parallel for chunk in chunks)
    optimizer = ShardedOptimizer(data_parallel, config.optimizer, mesh)
    return Replica(config, mesh, device, pipeline, data_parallel, optimizer, tuple(fp8_scales))


def capture_of(config: Config, device: torch.device) -> Capture | None:
    """Return what makes recordings of micro-batches where kernels.cuda_graphs asks for it: on a GPU, CUDA graphs."""
    return CudaGraphCapture() if config.kernels.cuda_graphs and device.type == "cuda" else None


def _build_chunk(
    config: Config,
    mesh: Mesh,
    number: int,
    meta: MetaChunk,
    options: DataParallelOptions,
    device: torch.device,
    fp8_scales: list[Fp8Scales],
    capture: Capture | None,
) -> PipelineChunk:
    """Return chunk `number` of the stage. `fp8_scales` gets the scales that its layers keep from step to step."""
    use_norms(meta.module, config.kernels)
    scales = use_fp8(meta.module, config.fp8, device)
    if scales is not None:
        fp8_scales.append(scales)
    if config.parallel.recompute == "full":
        for block in meta.module.blocks.values():
            recompute_fully(block)
    data_parallel = ChunkDataParallel(meta.parameters, mesh.dp, mesh.tp, mesh.embedding, options, device, number)
    built = PipelineChunk(meta.module, meta.rematerializer, data_parallel)
    if capture is None:
        return built
    return replace(built, graphs=GraphedChunk(built.forward, data_parallel, capture, lambda: _decisions(meta, scales)))


def _offload_activations(config: Config, mesh: Mesh, metas: Sequence[MetaChunk], device: torch.device) -> None:
    """Let the first layers of each chunk offload. The chunks, which have their memory by now, share the way there."""
    copies = CudaCopies(device) if device.type == "cuda" else ImmediateCopies()
    tokens = config.model.seq_len // mesh.layout.tp_size * config.batch.micro_batch_size
    for meta in metas:
        offloader = Offloader(copies, smallest_numel=SMALLEST_ACTIVATION_WIDTH * tokens)
        offloader.attach(meta.module, list(meta.module.blocks.values()), config.parallel.offload_layers)
        meta.rematerializer.keeper = offloader


def _decisions(meta: MetaChunk, scales: Fp8Scales | None) -> Hashable:
    """Return what the model's Python decides by and what changes while it trains: see docs/adr/0029."""
    return meta.module.training, scales is not None and scales.scaling.is_primed
