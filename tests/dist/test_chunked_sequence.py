"""A residual branch in sequence chunks exchanges as many bytes as without chunks, and takes the estimated memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory import measure_rank, with_changes
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import RecordFlag
from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.black_boxes import boxes_by_rank, recording_in, spans
from tests.helpers.rank_pool import RankPool
from tests.helpers.training_case import make_config, on_layout

NUM_LAYERS, NUM_CHUNKS = 2, 4
EXCHANGES = (Operation.TP_ALL_GATHER, Operation.TP_REDUCE_SCATTER)
ENDS = {Operation.TP_ALL_GATHER: 3, Operation.TP_REDUCE_SCATTER: 2}
"""The exchanges of embedding and head for a micro-batch, which are not in chunks: in forward, in backward, and for the
head again."""


@pytest.mark.slow
@pytest.mark.parametrize(("block", "recompute"), [("parallel", "none"), ("serial", "selective"), ("serial", "full")])
def test_chunks_send_the_same_bytes_in_more_exchanges(
    block: str, recompute: str, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    numbers, sizes = {}, {}
    for num_chunks in (1, NUM_CHUNKS):
        directory = tmp_path / str(num_chunks)
        directory.mkdir()
        config = make_config(
            train_data,
            {"train": {"steps": 1}, "optimizer": {"lr_warmup_steps": 0}},
            {"model": {"num_layers": NUM_LAYERS, "block": block}},
            on_layout(2, 1, 1),
            {"parallel": {"num_sequence_chunks": num_chunks, "recompute": recompute}},
            recording_in(directory),
        )
        jobs.run(config)
        for rank, box in boxes_by_rank(directory).items():
            for operation in EXCHANGES:
                found = spans(box, operation)
                assert not any(span.is_in_flight for span in found)
                # Chunks use a lane, which records their ends.
                assert all(bool(span.flags & RecordFlag.WATCHED) == (num_chunks > 1) for span in found)
                numbers[num_chunks, rank, operation] = len(found)
                sizes[num_chunks, rank, operation] = sum(span.num_bytes for span in found)
    num_microbatches = config.num_microbatches(config.layout(None))

    for rank in (0, 1):
        for operation in EXCHANGES:
            assert sizes[1, rank, operation] == sizes[NUM_CHUNKS, rank, operation], operation
            at_ends = ENDS[operation] * num_microbatches
            in_branches = numbers[1, rank, operation] - at_ends
            assert numbers[NUM_CHUNKS, rank, operation] == at_ends + NUM_CHUNKS * in_branches, operation
    if recompute != "full":
        branches = NUM_LAYERS * (1 if block == "parallel" else 2) * num_microbatches
        # One gather and one scatter in forward, their duals in backward, and the gather of the branch's input again.
        assert numbers[1, 0, Operation.TP_ALL_GATHER] == 3 * branches + 3 * num_microbatches
        assert numbers[1, 0, Operation.TP_REDUCE_SCATTER] == 2 * branches + 2 * num_microbatches


SMALL: dict[str, Any] = {
    # The vocabulary is so small, and the sequences so many, that the blocks take most of the memory.
    "model.vocab_size": 128,
    "model.seq_len": 128,
    "model.hidden_size": 128,
    "model.num_layers": 2,
    "batch.micro_batch_size": 8,
    "batch.global_batch_size": 16,
    "parallel.tp_size": 2,
    "parallel.num_sequence_chunks": NUM_CHUNKS,
}
CASES: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama, parallel, selective, dropout": {
        "model.block": "parallel",
        "model.positions": "rope",
        "model.norm": "rmsnorm",
        "model.mlp": "swiglu",
        "model.has_bias": False,
        "model.num_kv_heads": 2,
        "model.dropout": 0.1,
        "parallel.recompute": "selective",
    },
    "GPT, full": {"parallel.recompute": "full"},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_estimate_is_what_a_step_holds(changes: dict[str, Any], rank_pool: RankPool) -> None:
    for counted, estimated, moment in rank_pool.run(measure_rank, 2, with_changes({**SMALL, **changes})):
        assert abs(estimated / counted - 1) < 0.07, f"{counted:,} counted, {estimated:,} estimated: {moment}"
