"""Jobs with pictures from shards: the numbers of one process in other layouts, by both loaders, after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.contracts.black_box.operations import Operation
from tests.dist.restarts import place
from tests.dist.test_resume import STEPS, Sizes, assert_every_sample_is_trained_on_once, stop_and_resume
from tests.dist.training_jobs import (
    TWO_STEPS,
    Tables,
    TrainingJobs,
    assert_bitwise,
    assert_close,
    assert_continues,
    assert_parity,
)
from tests.helpers.black_boxes import boxes_by_rank, recording_in, spans
from tests.helpers.picture_shards import VOCAB_SIZE, shard_tables, write_shards
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config, on_layout

BOUND = 1e-10
LAYOUTS: dict[str, Sizes] = {"dp2": (1, 1, 2, 1), "dp4": (1, 1, 4, 1), "tp2-pp2": (2, 2, 1, 1)}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("data") / "shards", 2, 10, bad=(4, 9, 14, 17, 19))


@pytest.fixture(scope="module")
def tables(shards: Path) -> Tables:
    found = shard_tables(shards)
    return {**found, "data": {**found["data"], "bad_samples": "replace"}}


@pytest.mark.slow(kept=["dp2-host"])
@pytest.mark.parametrize("loader", ["thread", "host"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_give_the_numbers_of_one_process(
    layout: str, loader: str, tables: Tables, jobs: TrainingJobs, tmp_path: Path
) -> None:
    reference = jobs.remembered(make_config(TWO_STEPS, tables))
    changes: Tables = {"data": {**tables["data"], "loader": loader}, **recording_in(tmp_path / "boxes")}
    config = make_config(TWO_STEPS, tables, on_layout(*LAYOUTS[layout]), changes, place(tmp_path))
    run = jobs.run(config)

    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    replaced = [[report.num_replaced for report in one.steps] for one in (run, reference)]
    assert replaced[0] == replaced[1]
    assert sum(replaced[0]) > 0
    asking = {rank for rank, box in boxes_by_rank(tmp_path / "boxes").items() if spans(box, Operation.PICTURE_REQUESTS)}
    # one rank of each replica records the reads of the host's loader
    assert len(asking) == (config.parallel.dp_size if loader == "host" else config.layout(None).world_size)


@pytest.mark.slow(kept=["tp2-pp2-host"])
@pytest.mark.parametrize("loader", ["thread", "host"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_held_out_shards_have_the_loss_of_one_process(
    layout: str, loader: str, tables: Tables, jobs: TrainingJobs, tmp_path: Path
) -> None:
    """7 of 9 held-out pictures, of which one is bad, beside text: no layout divides them evenly."""
    directory = write_shards(tmp_path / "held-out", 1, 9, bad=(2,))
    text = write_corpus(tmp_path / "text", 40, VOCAB_SIZE)
    held_out: Tables = {
        "validation_set": {"path": str(directory), "pictures": "shards", "name": "pictures"},
        "validation_set-2": {"path": str(text), "name": "text"},
        "evaluation": {"num_samples": 7, "interval": 1},
    }
    reference = jobs.run(make_config(TWO_STEPS, tables, held_out))
    changes: Tables = {"data": {**tables["data"], "loader": loader}}
    run = jobs.run(make_config(TWO_STEPS, tables, held_out, on_layout(*LAYOUTS[layout]), changes, place(tmp_path)))

    assert_parity(run, reference, BOUND)
    found, expected = (one.ranks[0].evaluations for one in (run, reference))
    assert [one.step for one in found] == [1, 2]
    counts, sets = ([[part.num_tokens for part in one.sets] for one in some] for some in (found, expected))
    assert counts == sets
    assert counts[0][0] < 7 * 11
    for one, other in zip(found, expected, strict=True):
        assert_close([part.loss for part in one.sets], [part.loss for part in other.sets], BOUND, "evaluation")


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["thread", "host"])
@pytest.mark.parametrize("layout", ["dp2", "tp2-pp2"])
def test_shards_beside_text_give_the_numbers_of_one_process(
    layout: str, loader: str, tables: Tables, jobs: TrainingJobs, tmp_path: Path
) -> None:
    text = write_corpus(tmp_path / "text", 2000, VOCAB_SIZE)
    mixture: Tables = {
        **tables,
        "data": {**tables["data"], "pictures": "none"},
        "data_source": {"pictures": "shards"},
        "data_source-2": {"path": str(text), "name": "web"},
    }
    reference = jobs.run(make_config(TWO_STEPS, mixture, {"batch": {"micro_batch_size": 1}}))
    changes: Tables = {"data": {**mixture["data"], "loader": loader, "balance": "cost"}}
    run = jobs.run(make_config(TWO_STEPS, mixture, on_layout(*LAYOUTS[layout]), changes, place(tmp_path)))

    assert_bitwise(run.initial, reference.initial)
    assert_parity(run, reference, BOUND)
    counts = [report.num_pictures for report in run.steps]
    assert counts == [report.num_pictures for report in reference.steps]
    assert 0 < min(counts) <= max(counts) < 8


@pytest.mark.slow
@pytest.mark.parametrize("pair", [((1, 1, 2, 1), (1, 2, 2, 1)), ((2, 1, 1, 1), (1, 1, 4, 1))])
def test_shards_resumed_at_another_layout(
    pair: tuple[Sizes, Sizes], tables: Tables, jobs: TrainingJobs, tmp_path: Path
) -> None:
    common: Tables = {**tables, "train": {"steps": STEPS}, "optimizer": {"eps": 1e-4}}
    host: Tables = {"data": {**tables["data"], "loader": "host"}}
    before, after = stop_and_resume(jobs, common, tmp_path, *pair, changes=host)
    reference = jobs.remembered(make_config(common))

    assert_continues(before, after, reference, BOUND)
    again, last = stop_and_resume(jobs, common, tmp_path / "by thread", *pair)
    assert_every_sample_is_trained_on_once(again, last)
