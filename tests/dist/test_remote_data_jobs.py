"""Jobs that train on data behind URLs: the same numbers as with local files, bit by bit, with either loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.restarts import place
from tests.dist.training_jobs import SHALLOW, TWO_STEPS, Tables, TrainingJobs
from tests.helpers.training_case import make_config, on_layout


@pytest.mark.slow(kept=["host"])
@pytest.mark.parametrize("loader", ["thread", "host"])
def test_job_on_urls_trains_as_on_the_local_files(
    loader: str, jobs: TrainingJobs, all_data: Tables, tmp_path: Path
) -> None:
    train, validation = all_data["data"]["train"], all_data["data"]["validation"]
    cache = {"cache_directory": str(tmp_path / "cache"), "cache_block_bytes": 4096, "readahead_blocks": 8}
    found, expected = (
        jobs.run(
            make_config(
                TWO_STEPS,
                SHALLOW,
                on_layout(1, 1, 2),
                place(tmp_path / name),
                {"data": {"train": "", "validation": f"{scheme}{validation}", "has_document_mask": True, **more}},
                {"data_source": {"path": f"{scheme}{train}", "name": "web"}},
            )
        )
        for name, scheme, more in (("url", "file://", {**cache, "loader": loader}), ("local", "", {}))
    )
    assert found.losses == expected.losses
    assert found.evaluation.loss == expected.evaluation.loss
    assert [record.digests for record in found.ranks] == [record.digests for record in expected.ranks]
    assert list((tmp_path / "cache").glob("megatrain-data-*/??/*"))
