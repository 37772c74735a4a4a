"""Options that change only the timing change no bit; options that change the order of a sum change the last bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.contracts.black_box.operations import Operation
from tests.dist.overlap_runs import assert_overlap_changes_no_bit
from tests.dist.training_jobs import (
    Tables,
    TrainingJobs,
    assert_close,
    assert_parity,
    assert_states_bitwise,
    distance,
)
from tests.helpers.black_boxes import boxes_by_rank, recording_in, spans, spans_by_step
from tests.helpers.training_case import make_config, on_layout

LAYOUTS = {
    "dp4": on_layout(1, 1, 4),
    "tp2-dp2": on_layout(2, 1, 2),
    "pp2-dp2": on_layout(1, 2, 2),
    "pp2-dp2-chunks2": on_layout(1, 2, 2, 2),
    "tp2-pp2-chunks2": on_layout(2, 2, 1, 2),
    "dp2-chunks2": on_layout(1, 1, 2, 2),
    "pp2-dp2-zero-bubble": on_layout(1, 2, 2, schedule="zero_bubble"),
    "tp2-pp2-zero-bubble": on_layout(2, 2, 1, schedule="zero_bubble"),
}
COMMON: Tables = {"train": {"precision": "fp32", "steps": 3}, "model": {"dropout": 0.1}}
OPTIONS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "dp4": ("dp4", {}, {"num_layers": 2}),
    "tp2-dp2-zero2-selective": ("tp2-dp2", {"zero_stage": 2, "recompute": "selective"}, {"num_layers": 2}),
    "pp2-dp2-zero2-tied": ("pp2-dp2", {"zero_stage": 2}, {"has_tied_head": True, "num_layers": 2}),
    "tp2-pp2-chunks2-full": ("tp2-pp2-chunks2", {"recompute": "full"}, {}),
    "dp2-chunks2-tied": ("dp2-chunks2", {}, {"has_tied_head": True, "num_layers": 2}),
    "pp2-dp2-zero-bubble": ("pp2-dp2-zero-bubble", {}, {"num_layers": 2}),
    "pp2-dp2-chunks2": ("pp2-dp2-chunks2", {}, {}),
    "tp2-pp2-zero-bubble": ("tp2-pp2-zero-bubble", {}, {"num_layers": 2}),
}
RESTARTED = ("dp4", "dp2-chunks2-tied", "pp2-dp2-chunks2")


@pytest.mark.slow(kept=["dp2-chunks2-tied"])
@pytest.mark.parametrize("case", OPTIONS)
def test_overlap_changes_no_bit(case: str, jobs: TrainingJobs, all_data: Tables, tmp_path: Path) -> None:
    layout, parallel, model = OPTIONS[case]
    tables = (all_data, LAYOUTS[layout], {"parallel": parallel, "model": {"dropout": 0.1, **model}})

    assert_overlap_changes_no_bit(jobs, tables, tmp_path if case in RESTARTED else None)


SEQUENCE_CHUNKS: dict[str, list[Tables]] = {
    "tp2-dp2, serial, accumulation": [
        on_layout(2, 1, 2),
        {"parallel": {"num_sequence_chunks": 4}, "model": {"dropout": 0.1, "has_bias": False, "num_layers": 1}},
    ],
    "tp4, parallel, selective": [
        on_layout(4, 1, 1),
        {"parallel": {"num_sequence_chunks": 2, "recompute": "selective"}, "batch": {"micro_batch_size": 8}},
        {"model": {"block": "parallel", "mlp": "swiglu", "positions": "rope", "norm": "rmsnorm"}},
    ],
    "tp2-pp2, parallel, full": [
        on_layout(2, 2, 1),
        {"parallel": {"num_sequence_chunks": 2, "recompute": "full"}},
        {"model": {"block": "parallel", "has_tied_head": False}},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SEQUENCE_CHUNKS)
def test_sequence_chunks_overlapped_with_products_change_no_bit(
    case: str, jobs: TrainingJobs, train_data: Tables
) -> None:
    small: Tables = {"train": {"precision": "fp32", "steps": 3}, "model": {"num_layers": 2}}
    on, off = (
        jobs.run(make_config(train_data, small, *SEQUENCE_CHUNKS[case], {"parallel": {"overlap": overlap}}))
        for overlap in (True, False)
    )

    assert on.losses == off.losses
    assert on.grad_norms == off.grad_norms
    assert_states_bitwise(on.final_state, off.final_state)


def test_chunks_of_a_stage_reduce_during_other_backwards(
    jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    jobs.run(make_config(train_data, COMMON, LAYOUTS["dp2-chunks2"], recording_in(tmp_path)))
    for box in boxes_by_rank(tmp_path).values():
        for step in range(3):
            started = [span for span in spans(box, Operation.GRADS_REDUCE_SCATTER) if span.step == step]
            backward = [span for span in spans(box, Operation.BACKWARD_COMPUTE) if span.step == step]
            first = min(one.start_ns for one in started)
            later = [one for one in backward if one.start_ns > first]
            assert {one.chunk for one in started if one.start_ns < later[0].start_ns} == {1}
            assert [one.chunk for one in later] == [0], "only the first chunk's last backward comes after"
    assert_buckets_overlap_in_one_order(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp4", "tp2-dp2", "pp2-dp2-zero-bubble"])
def test_buckets_overlap_in_one_order_on_all_ranks(
    layout: str, jobs: TrainingJobs, train_data: Tables, tmp_path: Path
) -> None:
    jobs.run(make_config(train_data, COMMON, LAYOUTS[layout], recording_in(tmp_path)))
    assert_buckets_overlap_in_one_order(tmp_path)


def assert_buckets_overlap_in_one_order(directory: Path) -> None:
    """Check the recorded exchanges of buckets: reductions start during backward, in the same order on all ranks."""
    orders: dict[int, list[list[tuple[Operation, int]]]] = {}
    for box in boxes_by_rank(directory).values():
        identity = box.identity
        exchanged = [
            (span.start_ns, span.operation, span.num_bytes)
            for operation in (Operation.GRADS_REDUCE_SCATTER, Operation.PARAMS_ALL_GATHER)
            for span in spans(box, operation)
        ]
        stage = identity.layout.coordinate(identity.rank)["pp"]
        orders.setdefault(stage, []).append([what for _, *what in sorted(exchanged)])
        computes = (Operation.BACKWARD_COMPUTE, Operation.BACKWARD_WEIGHT_COMPUTE)
        for step in (1, 2):
            ends = [
                span.start_ns + span.duration_ns for kind in computes for span in spans(box, kind) if span.step == step
            ]
            reduced = [span for span in spans(box, Operation.GRADS_REDUCE_SCATTER) if span.step == step]
            assert len(reduced) > 1
            assert min(one.start_ns for one in reduced) < max(ends)

    for of_ranks in orders.values():
        assert len(of_ranks) > 1
        assert all(order == of_ranks[0] for order in of_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp4", "pp2-dp2-chunks2"])
def test_zero_stages_agree_to_rounding(layout: str, jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    # 4 micro-batches or more, so that the stages have different sums
    several: Tables = {"train": {"precision": "fp64", "steps": 3}, "batch": {"global_batch_size": 16}}
    runs, boxes = {}, {}
    for zero_stage in (1, 2):
        directory = tmp_path / str(zero_stage)
        directory.mkdir()
        stage: Tables = {"parallel": {"zero_stage": zero_stage}}
        config = make_config(train_data, several, LAYOUTS[layout], stage, recording_in(directory))
        runs[zero_stage], boxes[zero_stage] = jobs.run(config), boxes_by_rank(directory)
        num_microbatches = 16 // (config.batch.micro_batch_size * config.parallel.dp_size)

    assert_parity(runs[2], runs[1], 1e-11)
    assert num_microbatches >= 4
    for rank, box in boxes[1].items():
        # Parameters are gathered once a step, bucket by bucket; ZeRO-1 reduces as often, ZeRO-2 reduces for each
        # micro-batch.
        num_buckets = spans_by_step(box, Operation.PARAMS_ALL_GATHER)[1]
        assert num_buckets > config.parallel.num_chunks
        once = dict.fromkeys(range(3), num_buckets)
        assert spans_by_step(box, Operation.GRADS_REDUCE_SCATTER) == once, rank
        often = {step: count * num_microbatches for step, count in once.items()}
        assert spans_by_step(boxes[2][rank], Operation.GRADS_REDUCE_SCATTER) == often, rank


@pytest.mark.slow
def test_gradients_reduced_in_bf16_stay_close(jobs: TrainingJobs, train_data: Tables) -> None:
    bf16: Tables = {"train": {"precision": "bf16"}, "optimizer": {"eps": 1e-4}}
    exact, rounded = (
        jobs.run(make_config(train_data, bf16, LAYOUTS["dp4"], {"parallel": {"grad_reduce_dtype": dtype}}))
        for dtype in ("fp32", "bf16")
    )

    # The bounds are those between layouts in bf16 (test_parity_precision.py): one more rounding of each gradient.
    assert_close(rounded.grad_norms, exact.grad_norms, 2.0**-8, "gradient norm")
    assert_close(rounded.losses, exact.losses, 2.0**-13, "loss")
    errors = distance(rounded.final_state["master"], exact.final_state["master"])
    assert max(errors.values()) <= 2.0**-5, errors
    assert rounded.grad_norms != exact.grad_norms
