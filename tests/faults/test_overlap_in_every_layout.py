"""Overlap on and off over twenty steps and a restart, in every layout of the parity matrix: no bit differs.

A part of them, with more options, is in tests/dist.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.overlap_runs import assert_overlap_changes_no_bit
from tests.dist.test_parity_layouts import LAYOUTS
from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import TINY, on_layout

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    directory, vocab_size = tmp_path_factory.mktemp("tokens"), TINY["model"]["vocab_size"]
    files = {
        "train": write_corpus(directory / "train", 4000, vocab_size, seed=1),
        "validation": write_corpus(directory / "held-out", 200, vocab_size, seed=2),
    }
    return {"data": {name: str(path) for name, path in files.items()}}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "tp{}-pp{}-dp{}-chunks{}".format(*layout))
def test_overlap_changes_no_bit(
    layout: tuple[int, int, int, int], data: Tables, rank_pool: RankPool, tmp_path: Path
) -> None:
    tp, pp, dp, chunks = layout
    schedule = "zero_bubble" if chunks == 1 and pp > 1 and dp > 1 else "1f1b"
    model: Tables = {"model": {"num_layers": max(2, pp * chunks), "dropout": 0.1}}

    assert_overlap_changes_no_bit(
        TrainingJobs(rank_pool), (data, model, on_layout(tp, pp, dp, chunks, schedule)), tmp_path
    )
