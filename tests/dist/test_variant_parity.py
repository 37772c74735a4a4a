"""Variants of other packages, with their own parameters, compute the same in every layout as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.training_jobs import TWO_STEPS, Tables, TrainingJobs, assert_bitwise, assert_parity
from tests.helpers.training_case import make_config, on_layout
from tests.helpers.variant_package import on_the_path, write_variant_package

BOUND = 1e-10
LAYOUTS: dict[str, list[Tables]] = {
    "tp2-dp2": [on_layout(2, 1, 2), {"parallel": {"num_sequence_chunks": 2, "recompute": "full"}}],
    "more-ranks-than-keys": [on_layout(4, 1, 1), {"parallel": {"num_sequence_chunks": 2, "recompute": "selective"}}],
    "zero-bubble": [on_layout(2, 2, 1, schedule="zero_bubble")],
}
POSITIONS: dict[str, set[str]] = {"counted": {"pace", "table"}, "leaning": {"stretch", "lean"}, "none": set()}
"""Position scheme -> its parameters."""
# Without parameters, layouts differ only in the ranks that compute the positions of a chunk of the sequence.
PLACED = [(positions, layout) for positions in POSITIONS for layout in LAYOUTS if POSITIONS[positions]]
PLACED.append(("none", "tp2-dp2"))


@pytest.mark.slow(kept=["zero-bubble"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_variants_give_the_numbers_of_one_process(
    layout: str, jobs: TrainingJobs, all_data: Tables, tmp_path: Path
) -> None:
    write_variant_package(tmp_path)
    common: Tables = {
        "model": {
            "mlp": "leaky_glu", "norm": "dynamic_tanh", "attention": "sink", "num_layers": 2, "num_kv_heads": 2,
            "positions": "rope",
        },
        "data": all_data["data"],
    }  # fmt: skip
    with on_the_path(tmp_path):  # The pool's ranks get the import path of this process.
        reference = jobs.remembered(make_config(TWO_STEPS, common))
        run = jobs.run(make_config(TWO_STEPS, *LAYOUTS[layout], common))

    assert {name.rpartition(".")[2] for name in reference.final} >= {"slope", "offset", "alpha", "sink", "temper"}
    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)


@pytest.mark.slow(kept=["leaning-zero-bubble"])
@pytest.mark.parametrize(("positions", "layout"), PLACED)
def test_positions_give_the_numbers_of_one_process(
    positions: str, layout: str, jobs: TrainingJobs, all_data: Tables, tmp_path: Path
) -> None:
    write_variant_package(tmp_path)
    common: Tables = {
        "model": {"num_layers": 2, "num_kv_heads": 2, "positions": positions},
        "data": all_data["data"],
    }
    with on_the_path(tmp_path):
        reference = jobs.remembered(make_config(TWO_STEPS, common))
        run = jobs.run(make_config(TWO_STEPS, *LAYOUTS[layout], common))

    names = {name.rpartition(".")[2] for name in reference.final}
    assert names >= POSITIONS[positions]
    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
