"""Jobs whose batches come from the data loader of their host: the same numbers, bit by bit, also after a resume."""

from __future__ import annotations

from pathlib import Path

from tests.dist.restarts import assert_goes_on_as_if_never_stopped, place, source_of
from tests.dist.training_jobs import SHALLOW, Tables, TrainingJobs
from tests.helpers.training_case import make_config, on_layout


def test_host_loader_trains_as_the_ranks_threads_do(jobs: TrainingJobs, all_data: Tables, tmp_path: Path) -> None:
    tables: tuple[Tables, ...] = (
        all_data,
        SHALLOW,
        on_layout(2, 1, 1),
        {"data": {"has_document_mask": True}, "optimizer": {"lr_decay_steps": 100}, "evaluation": {"interval": 2}},
        {"batch": {"rampup_start": 4, "rampup_increment": 4, "rampup_samples": 8}, "train": {"steps": 4}},
    )
    straight = jobs.run(make_config(*tables))
    host: tuple[Tables, ...] = (*tables, place(tmp_path), {"data": {"loader": "host"}})
    first = jobs.run(make_config(*host, {"train": {"steps": 2}, "checkpoint": {"save_at_end": True}}))
    assert first.losses == straight.losses[:2]
    assert any(note.startswith('data.loader="host": one process reads') for note in first.ranks[0].notes)
    assert all(record.samples == {} for record in first.ranks)

    after = jobs.run(make_config(*host))
    assert source_of(after)
    assert_goes_on_as_if_never_stopped(after, straight, 2)
    assert not list(tmp_path.rglob("loader-r*"))
