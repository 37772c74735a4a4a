"""The best time of a step has closed forms in simple cases, and never overlaps operations that must be sequential."""

from __future__ import annotations

import pytest

from benchmarks.overlap_ideal import Computes, ideal_of_schedule, sent_bytes
from megatrain.config.config import Config
from megatrain.schedule import ActionKind

FORWARD_S, BACKWARD_S, UPDATE_S = 1.0, 2.0, 0.5
FREE = 1e15


def config_of(**parallel: object) -> Config:
    return Config.from_dict(
        {
            "model": {"vocab_size": 64, "seq_len": 8, "hidden_size": 16, "num_layers": 8, "num_heads": 2},
            "parallel": {
                "schedule": "interleaved" if parallel.get("num_chunks", 1) != 1 else "1f1b",
                "dp_size": 1,
                **parallel,
            },
            "batch": {"micro_batch_size": 2, "global_batch_size": 16},
            "train": {"steps": 1, "precision": "fp32"},
            "optimizer": {"lr": 1e-4},
            "runtime": {"device": "cpu"},
        }
    )


def computes_of(config: Config) -> list[Computes]:
    layout = config.layout(None)
    schedule = config.parallel.build_schedule(config.num_microbatches(layout))
    seconds = {ActionKind.FORWARD: FORWARD_S, ActionKind.BACKWARD: BACKWARD_S}
    found = []
    for rank in range(layout.world_size):
        actions = schedule.stages[layout.coordinate(rank)["pp"]]
        parts = {(a.kind, a.chunk, a.microbatch): seconds[a.kind] for a in actions if a.kind in seconds}
        found.append(Computes(parts, UPDATE_S))
    return found


@pytest.mark.parametrize(("pp_size", "num_chunks", "dp_size"), [(1, 1, 1), (1, 4, 2), (2, 1, 1), (4, 2, 2)])
def test_with_free_links_a_step_computes_and_has_its_bubble(pp_size: int, num_chunks: int, dp_size: int) -> None:
    config = config_of(pp_size=pp_size, num_chunks=num_chunks, dp_size=dp_size)
    num_microbatches = config.num_microbatches(config.layout(None))

    per_chunk = FORWARD_S + BACKWARD_S
    expected = (num_microbatches * num_chunks + pp_size - 1) * per_chunk + UPDATE_S
    assert ideal_of_schedule(config, computes_of(config), FREE) == pytest.approx(expected)


@pytest.mark.parametrize(("num_chunks", "bucket_size"), [(1, 1_000_000), (1, 1), (4, 1)])
def test_only_the_last_bucket_of_backward_is_waited_for(num_chunks: int, bucket_size: int) -> None:
    """It is the first bucket of forward. With large buckets it is nearly everything, and almost nothing is
    overlapped."""
    config = config_of(dp_size=2, num_chunks=num_chunks, bucket_size=bucket_size)
    buckets = sent_bytes(config)[0][0, 0]
    assert len(buckets) >= 2
    rate = sum(buckets) / (3.0 if bucket_size > 1 else 0.1)
    compute = config.num_microbatches(config.layout(None)) * num_chunks * (FORWARD_S + BACKWARD_S) + UPDATE_S

    assert ideal_of_schedule(config, computes_of(config), rate) == pytest.approx(compute + 2 * buckets[-1] / rate)


def test_a_message_is_waited_for_where_no_compute_lies_between() -> None:
    config = config_of(pp_size=2)
    bucket_bytes, message_bytes = sent_bytes(config)
    assert {size for sizes in bucket_bytes.values() for size in sizes} == {0}
    assert message_bytes == 8 * 2 * 16 * 4
    late = ideal_of_schedule(config, computes_of(config), message_bytes / 0.1)
    free = ideal_of_schedule(config, computes_of(config), FREE)

    # 1F1B: the first activation, the last gradient, and the messages of the two stages in between
    assert free + 2 * 0.1 <= late + 1e-9
    assert late <= free + 2 * 8 * 0.1
