"""Peak tensor bytes of each rank in two training steps, compared with the estimate of `config check --dry-run`.

A dispatch mode counts the bytes while the real steps run on gloo ranks: python -m benchmarks memory [--write]
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.bars import Bar, at_most
from benchmarks.result import Result
from megatrain.comm import leave
from megatrain.comm.gloo import GlooCommunicator
from megatrain.comm.lanes import AwaitedLane
from megatrain.config.config import Config
from megatrain.config.pictures import patch_width
from megatrain.model import PatchRows
from megatrain.parallel.pipeline import PipelineInput
from megatrain.planning.chunks import plan_stage, planned_mesh
from megatrain.planning.memory import estimate_memory
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes
from megatrain.planning.update import plan_update
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step import train_step
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext

BAR = 0.03
"""The greatest allowed difference between the estimate and the count, as a fraction of the count."""
NUM_STEPS = 2
"""Buckets are reduced in the last backward of both; only the second one gathers parameters that a step has updated."""
_BASE: dict[str, dict[str, Any]] = {
    # activations, weights and logits all matter at this size
    "model": {"vocab_size": 2048, "seq_len": 256, "hidden_size": 256, "num_layers": 4, "num_heads": 4},
    "batch": {"micro_batch_size": 2, "global_batch_size": 16},
    "train": {"steps": 1, "precision": "fp32"},
    "optimizer": {"lr": 1e-3},
    "runtime": {"device": "cpu"},
}
LLAMA: dict[str, Any] = {
    "model.positions": "rope", "model.norm": "rmsnorm", "model.mlp": "swiglu", "model.has_bias": False,
    "model.num_kv_heads": 2, "model.has_tied_head": False,
}  # fmt: skip
_INTERLEAVED = {"parallel.pp_size": 2, "parallel.num_chunks": 2, "parallel.schedule": "interleaved"}
CASES: dict[str, dict[str, Any]] = {
    "GPT": {},
    "GPT, bf16": {"train.precision": "bf16"},
    "GPT, 8 layers, selective": {"model.num_layers": 8, "parallel.recompute": "selective"},
    "Llama": LLAMA,
    "Llama, documents, full": {**LLAMA, "data.has_document_mask": True, "parallel.recompute": "full"},
    "parallel block, window, dropout, LAMB": {
        "model.block": "parallel", "model.window_size": 64, "model.dropout": 0.1, "optimizer.name": "lamb",
    },
    "GPT, tp2": {"parallel.tp_size": 2},
    "Llama, tp2, selective": {**LLAMA, "parallel.tp_size": 2, "parallel.recompute": "selective"},
    "parallel block, tp2, 4 sequence chunks": {
        "model.block": "parallel", "parallel.tp_size": 2, "parallel.num_sequence_chunks": 4,
    },
    "GPT, pp2, gpipe": {"parallel.pp_size": 2, "parallel.schedule": "gpipe"},
    "GPT, pp2, 2 chunks": _INTERLEAVED,
    "GPT, pp4, zero bubble": {"parallel.pp_size": 4, "parallel.schedule": "zero_bubble"},
    "Llama, tp2 pp2, zero bubble, selective": {
        **LLAMA, "parallel.tp_size": 2, "parallel.pp_size": 2, "parallel.schedule": "zero_bubble",
        "parallel.recompute": "selective",
    },
    "GPT, pp2, 2 chunks of uneven layers": {**_INTERLEAVED, "parallel.layers_per_chunk": [0, 3, 1, 0]},
    "GPT, dp2": {"parallel.dp_size": 2},
    "GPT, dp2, bf16, gradients summed in bf16": {
        "parallel.dp_size": 2, "train.precision": "bf16", "parallel.grad_reduce_dtype": "bf16",
    },
    "GPT, dp2, ZeRO-2, bf16, gradients summed in bf16": {
        "parallel.dp_size": 2, "parallel.zero_stage": 2, "train.precision": "bf16",
        "parallel.grad_reduce_dtype": "bf16",
    },
    # gradients in flight take more than what is kept, so the peak is near the end of the last backward
    "GPT, dp2, full, gradients summed in bf16": {
        "model.vocab_size": 256, "model.num_layers": 8, "batch.micro_batch_size": 4, "parallel.dp_size": 2,
        "parallel.recompute": "full", "parallel.bucket_size": 200_000, "train.precision": "bf16",
        "parallel.grad_reduce_dtype": "bf16",
    },
    "GPT, 4 chunks on one stage": {"parallel.num_chunks": 4, "parallel.schedule": "interleaved"},
    "Llama, dp2, ZeRO-2, bf16": {
        **LLAMA, "parallel.dp_size": 2, "parallel.zero_stage": 2, "train.precision": "bf16",
    },
    "parallel block, tp2 pp2 dp2, 2 chunks, ZeRO-2": {
        **_INTERLEAVED, "model.block": "parallel", "parallel.tp_size": 2, "parallel.dp_size": 2,
        "parallel.zero_stage": 2,
    },
}  # fmt: skip


def run() -> Result:
    """Run two steps of each case and compare every rank's peak with its estimate."""
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    with RankPool(size=8) as pool:
        for name, changes in CASES.items():
            tables = with_changes(changes)
            layout = Config.from_dict(tables).layout(None)
            peaks = pool.run(measure_rank, layout.world_size, tables, timeout_s=300.0)
            difference = max(abs(estimated / counted - 1) for counted, estimated, _ in peaks)
            bars.append(
                at_most(f"{name}: greatest difference of a rank, as a part of what is counted", difference, BAR)
            )
            for rank, (counted, estimated, moment) in enumerate(peaks):
                rows.append(
                    {
                        "case": name,
                        "rank": rank,
                        "counted, MiB": counted / 2**20,
                        "estimate, MiB": estimated / 2**20,
                        "difference": f"{estimated / counted - 1:+.1%}",
                        "fullest moment": moment,
                    }
                )
    return Result(
        name="memory",
        title="Peak tensor bytes of a rank in a training step, counted and estimated",
        command="python -m benchmarks memory --write",
        rows=rows,
        notes=[
            "counted by a dispatch mode: storages that operations return, each once, from its creation to its release",
            "not counted: memory inside kernels and communication libraries, and what an allocator rounds up or caches",
            "collectives of gradients and of sequence chunks are completed in their order, when they are awaited",
            f"{NUM_STEPS} steps, gloo, one thread a rank; on a GPU: not measured",
        ],
        settings={f"{section}.{key}": value for section, keys in _BASE.items() for key, value in keys.items()},
        bars=bars,
    )


def with_changes(changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the base configuration's tables with `changes`, keyed "section.key". dp_size is 1 unless changed."""
    tables: dict[str, dict[str, Any]] = {section: dict(keys) for section, keys in _BASE.items()}
    for path, value in {"parallel.dp_size": 1, **changes}.items():
        section, key = path.split(".")
        tables.setdefault(section, {})[key] = value
    return tables


def measure_rank(context: RankContext, tables: dict[str, dict[str, Any]]) -> tuple[int, int, str]:
    """Train NUM_STEPS steps as one rank. Return the counted peak, the estimated peak, and the estimated moment of it.

    Exchanges that have a lane run when they are awaited, so that the count does not depend on timing.
    """
    config, recorder = Config.from_dict(tables), Recorder(BlackBoxWriter.anonymous())
    layout = config.layout(context.world_size)
    mesh = joined_mesh(
        context,
        layout,
        recorder,
        has_wrap_links=config.parallel.num_chunks > 1,
        holders=config.holders,
        has_sequence_chunks=config.parallel.num_sequence_chunks > 1,
    )
    for group in mesh.by_name.values():
        communicator = group.communicator
        if isinstance(communicator, GlooCommunicator) and communicator.new_lane is not None:
            communicator.new_lane = lambda _: AwaitedLane()
    with PeakTensorBytes() as memory:
        rank_model = build_rank_model(config, mesh, recorder, mesh.device)
        rank_model.initialize()
        rank_model.set_training(True)
        inputs = random_inputs(rank_model)
        memory.reset_peak()
        for _ in range(NUM_STEPS):
            train_step(
                rank_model,
                config.parallel.build_schedule(len(inputs)),
                inputs,
                num_label_tokens=sum(one.labels_SB.numel() for one in inputs),
                lr=config.optimizer.lr,
                grad_clip=config.optimizer.grad_clip,
                recorder=recorder,
            )
    with planned_mesh(config, layout, context.rank) as planned:
        chunks = plan_stage(config, planned)
        update = plan_update(config, planned, chunks)
    estimate = estimate_memory(config, layout, mesh.stage, chunks, update)
    leave()
    return memory.peak_bytes, estimate.total, estimate.moment


def random_inputs(rank_model: RankModel) -> list[PipelineInput]:
    """Return the micro-batches of a step. Each tensor has its own memory, as from the data reader."""
    config = rank_model.config
    shape = (config.model.seq_len, config.batch.micro_batch_size)
    first_sample = torch.arange(config.batch.micro_batch_size)
    patch_shape = (config.model.num_patches, shape[1], patch_width(config.model))
    encodes = config.model.has_pictures and rank_model.mesh.stage == 0
    return [
        rank_model.pipeline_input(
            torch.randint(config.model.vocab_size, shape),
            torch.randint(config.model.vocab_size, shape),
            first_sample + microbatch * config.batch.micro_batch_size,
            torch.zeros(shape, dtype=torch.int64) if config.data.has_document_mask else None,
            PatchRows.of_all(torch.randint(256, patch_shape, dtype=torch.uint8)) if encodes else None,
        )
        for microbatch in range(config.num_microbatches(rank_model.mesh.layout))
    ]
