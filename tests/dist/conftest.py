"""Fixtures of the multi-process tests: token files that all of them read, and jobs on the shared pool."""

from __future__ import annotations

import pytest

from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import TINY

VOCAB_SIZE: int = TINY["model"]["vocab_size"]
SEQ_LEN: int = TINY["model"]["seq_len"]
NUM_VALIDATION_TOKENS = 12 * SEQ_LEN + 9 + 1
"""13 windows: no number of pipelines above 1 divides them, and the last window is shorter."""


@pytest.fixture(scope="session")
def train_data(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Return the tables that name training tokens, created once."""
    prefix = tmp_path_factory.mktemp("tokens") / "train"
    return {"data": {"train": str(write_corpus(prefix, 4000, VOCAB_SIZE, seed=1))}}


@pytest.fixture(scope="session")
def all_data(train_data: Tables, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Return the tables that name training and held-out tokens, created once."""
    prefix = tmp_path_factory.mktemp("tokens") / "held-out"
    validation = write_corpus(prefix, NUM_VALIDATION_TOKENS, VOCAB_SIZE, seed=2)
    return {"data": {**train_data["data"], "validation": str(validation)}}


@pytest.fixture(scope="session")
def jobs(rank_pool: RankPool) -> TrainingJobs:
    """Run jobs on the shared pool."""
    return TrainingJobs(rank_pool)
