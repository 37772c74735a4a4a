"""Samples that are assigned to replicas by cost give the losses and weights of samples assigned in order, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatrain.config.config import Config
from megatrain.data.costs import write_costs
from megatrain.data.indexed import IndexedDataset
from tests.dist.conftest import VOCAB_SIZE
from tests.dist.training_jobs import SHALLOW, Run, Tables, TrainingJobs, assert_bitwise, assert_close, distance
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import CaseOrders, make_config
from tests.helpers.waiting import wait_until

OF_LOSSES, OF_WEIGHTS = 1e-12, 1e-10
MASK = {"has_document_mask": True}
BY_COST = MASK | {"balance": "cost"}
BY_FILE = {"balance": "file"}
LAYOUTS: dict[str, Tables] = {
    "dp2": {"parallel": {"dp_size": 2}, **SHALLOW},
    "dp2-micro2": {"parallel": {"dp_size": 2}, "batch": {"micro_batch_size": 2}, **SHALLOW},
    "dp3": {"parallel": {"dp_size": 3}, **SHALLOW},
    "dp2-pp2": {"parallel": {"dp_size": 2, "pp_size": 2}, **SHALLOW},
    "dp3-pp2-zero2": {"parallel": {"dp_size": 3, "pp_size": 2, "zero_stage": 2}, **SHALLOW},
    "dp2-tp2-dropout": {"parallel": {"dp_size": 2, "tp_size": 2}, "model": {"dropout": 0.1, "num_layers": 2}},
}


def samples_of_replicas(run: Run, cursor: int) -> dict[int, list[int]]:
    return {record.coordinate["dp"]: record.samples[cursor] for record in run.ranks}


@pytest.fixture(scope="module")
def data_with_costs(all_data: Tables, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Return the tables of a source with costs that have nothing to do with the lengths of its documents."""
    dataset = IndexedDataset(write_corpus(tmp_path_factory.mktemp("costs") / "train", 4000, VOCAB_SIZE, seed=1))
    costs = np.random.default_rng(1).integers(0, 1000, dataset.num_documents).tolist()
    write_costs(dataset, map(str, costs), "costs")
    source = {"path": str(dataset.prefix), "name": "web"}
    return {"data": {"train": "", "validation": all_data["data"]["validation"]}, "data_source": source}


@pytest.mark.slow(kept=["dp3"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_dealing_by_cost_does_not_change_the_numbers(layout: Tables, jobs: TrainingJobs, all_data: Tables) -> None:
    check_same_numbers(jobs, [make_config({"data": all_data["data"] | keys}, layout) for keys in (MASK, BY_COST)])


@pytest.mark.slow(kept=["dp3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dealing_by_a_file_does_not_change_the_numbers(
    layout: str, jobs: TrainingJobs, data_with_costs: Tables
) -> None:
    # Costs of a file need no mask; layouts with and without one alternate.
    data = data_with_costs["data"] | (MASK if list(LAYOUTS).index(layout) % 2 else {})
    check_same_numbers(
        jobs, [make_config(data_with_costs, {"data": data | keys}, LAYOUTS[layout]) for keys in ({}, BY_FILE)]
    )


def check_same_numbers(jobs: TrainingJobs, configs: Sequence[Config]) -> None:
    """Check two jobs, of which the second one deals by cost."""
    in_order, by_cost = map(jobs.run, configs)
    assert_bitwise(by_cost.initial, in_order.initial)
    assert by_cost.samples_by_step() == in_order.samples_by_step()
    cursors = in_order.ranks[0].samples
    assert any(samples_of_replicas(by_cost, one) != samples_of_replicas(in_order, one) for one in cursors)
    assert_close(by_cost.losses, in_order.losses, OF_LOSSES, "loss")
    assert_close(by_cost.grad_norms, in_order.grad_norms, OF_WEIGHTS, "gradient norm")
    wrong = {name: error for name, error in distance(by_cost.final, in_order.final).items() if not error <= OF_WEIGHTS}
    assert not wrong, f"final weights off by {wrong}"
    assert by_cost.losses[-1] < by_cost.losses[0]
    assert by_cost.evaluation.loss == pytest.approx(in_order.evaluation.loss, rel=OF_WEIGHTS)


@pytest.mark.slow
def test_run_continues_with_other_dealings_and_layouts(jobs: TrainingJobs, train_data: Tables, tmp_path: Path) -> None:
    """Each layout trains one step and saves; the next one resumes from that. With 3 replicas the samples are uneven."""
    common: Tables = {"data": train_data["data"] | MASK, "train": {"steps": 4}, **SHALLOW}
    place: Tables = {"job": {"run_directory": str(tmp_path)}}
    reference = jobs.run(make_config(common))
    losses: list[float] = []
    for step, (dp_size, balance) in enumerate([(2, "cost"), (3, "cost"), (3, "none"), (2, "cost")]):
        orders = CaseOrders(stop_at=(dp_size - 1, step)) if step < 3 else CaseOrders()
        keys: Tables = {"data": common["data"] | {"balance": balance}, "parallel": {"dp_size": dp_size}}
        run = jobs.run(make_config(common, place, keys), orders)
        wait_until(lambda: not list(tmp_path.glob("megatrain-arena*")), "no snapshot left in memory")

        assert [report.step for report in run.steps] == [step + 1]
        assert run.samples_by_step()[8 * step] == list(range(8 * step, 8 * step + 8))
        losses += run.losses
    assert_close(losses, reference.losses, OF_LOSSES, "loss")
    wrong = {name: error for name, error in distance(run.final, reference.final).items() if not error <= OF_WEIGHTS}
    assert not wrong, f"final weights off by {wrong}"
