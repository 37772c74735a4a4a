"""The bytes that a rank sends in a step, by group."""

from __future__ import annotations

from typing import Any

from benchmarks.memory import with_changes
from megatrain.config.config import Config
from megatrain.planning.run_plan import plan_run

MODEL = {"model.vocab_size": 1024, "model.hidden_size": 128, "model.num_layers": 3, "model.seq_len": 64}
EMBEDDING_BYTES = 1024 * 128 * 4


def sums_of(group: str, **changes: Any) -> list[list[int]]:
    """Return, for each kind of stage, how many bytes of gradients a rank sends over this group."""
    tables = with_changes(
        MODEL | {"parallel.pp_size": 3} | {key.replace("__", "."): one for key, one in changes.items()}
    )
    return [
        [one.num_bytes for one in stage.traffic if (one.group, one.what) == (group, "gradients")]
        for stage in plan_run(Config.from_dict(tables)).stages
    ]


def test_the_ends_of_a_pipeline_sum_a_tied_embedding() -> None:
    """Each of two ranks sends half of the gradient twice; with replicas and tp only its shard of it."""
    assert sums_of("embedding", model__has_tied_head=True) == [[EMBEDDING_BYTES], [], [EMBEDDING_BYTES]]
    shards = sums_of("embedding", model__has_tied_head=True, parallel__tp_size=2, parallel__dp_size=2)
    assert shards == [[EMBEDDING_BYTES // 4], [], [EMBEDDING_BYTES // 4]]
    assert sums_of("embedding", model__has_tied_head=False) == [[], [], []]


def test_tp_ranks_sum_the_gradients_of_norms() -> None:
    assert sums_of("tp") == [[], [], []]
    found = sums_of("tp", parallel__tp_size=2)
    assert all(0 < one < EMBEDDING_BYTES for (one,) in found)
