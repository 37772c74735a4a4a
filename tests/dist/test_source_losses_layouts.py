"""In every layout, the loss of each source equals torch's cross entropy on the logits of one process."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.training.training_data import open_reader
from tests.dist.training_jobs import Tables, TrainingJobs, assert_close
from tests.helpers.mixed_data import losses_by_source, write_mixture
from tests.helpers.single_rank import single_rank_model
from tests.helpers.step_plans import step_plan
from tests.helpers.training_case import make_config, on_layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": on_layout(2, 1, 1),
    "dp2": on_layout(1, 1, 2),
    "pp2-chunks2": on_layout(1, 2, 1, 2),
    "pp2-zero-bubble": on_layout(1, 2, 1, schedule="zero_bubble"),
    "tp2-sequence-chunks2": {**on_layout(2, 1, 1), "parallel": {"tp_size": 2, "num_sequence_chunks": 2}},
}


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Return the tables that name two sources, created once."""
    return write_mixture(tmp_path_factory.mktemp("tokens"))


@pytest.mark.slow(kept=["tp2"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_losses_by_source_are_the_same_in_every_layout(layout: Tables, jobs: TrainingJobs, mixture: Tables) -> None:
    parallel = layout["parallel"]
    depth: Tables = {"model": {"num_layers": max(2, parallel.get("pp_size", 1) * parallel.get("num_chunks", 1))}}
    one_process = make_config(mixture, depth)
    size = one_process.batch.global_batch_size
    batches = [open_reader(one_process).read_step(step_plan(step * size, size), 0) for step in range(3)]
    expected = losses_by_source(single_rank_model(one_process), batches[0])
    run = jobs.run(make_config(mixture, depth, layout))

    assert {source.name: (source.loss, source.num_tokens) for source in run.steps[0].sources} == {
        name: (pytest.approx(loss, rel=1e-12), num_tokens) for name, (loss, num_tokens) in expected.items()
    }
    for report, batch in zip(run.steps, batches, strict=True):
        counts = [source.num_tokens for source in report.sources]
        assert sum(counts) == batch.num_label_tokens
        weighted = sum(source.loss * source.num_tokens for source in report.sources) / sum(counts)
        assert_close([weighted], [report.loss], 1e-12, "weighted mean of the sources")
    reference = jobs.remembered(one_process)
    for found, alone in zip(run.steps, reference.steps, strict=True):
        assert [source.name for source in found.sources] == [source.name for source in alone.sources] == ["web", "code"]
        assert_close(
            [source.loss for source in found.sources],
            [source.loss for source in alone.sources],
            1e-10,
            "loss of a source",
        )
