"""Replaced samples in a job: the same in every layout, and the same on ranks whose disks differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config.config import Config
from tests.dist.training_jobs import SHALLOW, Tables, TrainingJobs, assert_close, distance
from tests.helpers.bad_disk import break_disk
from tests.helpers.mixed_data import write_mixture
from tests.helpers.rank_protocol import RankContext
from tests.helpers.training_case import TINY, CaseOrders, RankRecord, make_config, on_layout, train_on_rank

SAMPLE_BYTES = 2 * (TINY["model"]["seq_len"] + 1)
BAD_BYTES = (300, 1100)
"""About a quarter of each file."""


def train_with_bad_disks(context: RankContext, config: Config, orders: CaseOrders) -> RankRecord:
    with pytest.MonkeyPatch.context() as patch:
        # Longer reads identify the data at the start.
        break_disk(patch, *BAD_BYTES, longest=SAMPLE_BYTES)
        return train_on_rank(context, config, orders)


def train_with_one_bad_disk(context: RankContext, config: Config, orders: CaseOrders) -> RankRecord:
    train = train_with_bad_disks if context.rank == context.world_size - 1 else train_on_rank
    return train(context, config, orders)


@pytest.fixture
def data(tmp_path: Path) -> Tables:
    mixture = write_mixture(tmp_path)
    return {**mixture, **SHALLOW, "data": {**mixture["data"], "bad_samples": "replace"}}


@pytest.mark.slow(kept=["tp"])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (2, 1, 2)], ids=["tp", "pp", "tp and dp"])
def test_all_ranks_replace_what_one_cannot_read(sizes: tuple[int, int, int], data: Tables, jobs: TrainingJobs) -> None:
    config = make_config(data, on_layout(*sizes))
    everywhere = jobs.run(config, worker=train_with_bad_disks)
    assert any(report.num_replaced for report in everywhere.steps)
    for report in everywhere.steps:
        assert sum(source.num_replaced for source in report.sources) == report.num_replaced

    if sizes[2] == 1:
        # The other ranks can read all samples, and replace the same ones.
        found = jobs.run(config, worker=train_with_one_bad_disk)
        assert found.losses == everywhere.losses
        assert [report.num_replaced for report in found.steps] == [one.num_replaced for one in everywhere.steps]
        assert [record.digests for record in found.ranks] == [record.digests for record in everywhere.ranks]
    alone = jobs.run(make_config(data), worker=train_with_bad_disks)
    assert [report.num_replaced for report in alone.steps] == [report.num_replaced for report in everywhere.steps]
    assert_close(alone.losses, everywhere.losses, 1e-12, "loss")
    assert max(distance(alone.final, everywhere.final).values()) <= 1e-10
