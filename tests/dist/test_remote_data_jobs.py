"""Jobs that train on data behind URLs: the numbers of the local files, bit by bit, with either loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.restarts import place
from tests.dist.training_jobs import Tables, TrainingJobs
from tests.helpers.training_case import make_config, on_layout


@pytest.mark.parametrize("loader", ["thread", "host"])
def test_job_on_urls_trains_as_on_the_local_files(
    loader: str, jobs: TrainingJobs, all_data: Tables, tmp_path: Path
) -> None:
    tables: tuple[Tables, ...] = (all_data, on_layout(2, 1, 2), {"data": {"has_document_mask": True}}, place(tmp_path))
    urls = {key: f"file://{all_data['data'][key]}" for key in ("train", "validation")}
    cache = {"cache_directory": str(tmp_path / "cache"), "cache_block_bytes": 4096, "readahead_blocks": 8}
    expected = jobs.run(make_config(*tables))
    found = jobs.run(make_config(*tables, {"data": {**urls, **cache, "loader": loader}}))
    assert found.losses == expected.losses
    assert found.evaluation == expected.evaluation
    assert [record.digests for record in found.ranks] == [record.digests for record in expected.ranks]
    assert list((tmp_path / "cache").glob("megatrain-data-*/??/*"))
