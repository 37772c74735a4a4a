"""The cost of samples by their documents, without reading tokens, and how a reader assigns samples by it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatrain.cli import main
from megatrain.config.config import Config
from megatrain.config.model_products import DocumentCost, document_cost
from megatrain.config.serialize import to_toml
from megatrain.contracts.step_plan import NO_SAMPLE, Dealing, StepPlan
from megatrain.data.bins import write_bins
from megatrain.data.indexed import IndexedDataset
from megatrain.data.microbatch import MicroBatch
from megatrain.data.reader import BatchReader
from megatrain.telemetry.flops import attended_pairs, forward_flops_per_token
from megatrain.training.training_data import open_reader
from tests.helpers.training_case import make_config

SEQ_LEN = 16
COST = DocumentCost(per_token=5, windows=((0, 2), (4, 3)))
SIZES = ((24, 1), (12, 2), (8, 3))


@pytest.fixture(params=["none", "best_fit"])
def config(request: pytest.FixtureRequest, write_tokens: Callable[..., Path]) -> Config:
    """Two sources with documents of 1 to 60 tokens, divided at samples or packed."""
    sources = {}
    for number, name in enumerate(("data_source", "data_source-2")):
        random = np.random.default_rng(number)
        lengths = np.minimum(60, random.lognormal(1.8, 1.2, 300).astype(np.int64) + 1)
        documents: Sequence[Sequence[int]] = [random.integers(0, 90, length).tolist() for length in lengths]
        prefix = write_tokens(documents, name, 90)
        write_bins(IndexedDataset(prefix), SEQ_LEN)
        sources[name] = {"path": str(prefix), "name": name, "weight": 1.0 + number}
    data = {"train": "", "has_document_mask": True, "packing": request.param, "balance": "cost"}
    return make_config({"data": data, "batch": {"global_batch_size": 24}, **sources})


def cost_by_hand(batch: MicroBatch, sample: int) -> int:
    """Return the cost of a sample of a micro-batch, computed document by document."""
    assert batch.document_SB is not None
    lengths = np.bincount(batch.document_SB[:, sample]).tolist()
    pairs = sum(
        layers * attended_pairs(length, window) for length in lengths if length for window, layers in COST.windows
    )
    return COST.per_token * SEQ_LEN + pairs


def test_costs_are_those_of_the_documents_that_are_read(config: Config) -> None:
    reader = replace(open_reader(config), balanced_cost=None)
    samples = np.arange(200, 300)
    (batch,) = reader.read_step(StepPlan(200, 100, 100, Dealing(1, 1)), 0).microbatches
    expected = [cost_by_hand(batch, sample) for sample in range(100)]
    assert len(set(expected)) > 10
    assert reader.costs(samples, COST).tolist() == expected


@pytest.mark.parametrize(("num_microbatches", "size"), SIZES)
def test_dealing_by_cost_keeps_the_samples_of_a_step(config: Config, num_microbatches: int, size: int) -> None:
    by_cost = open_reader(config)
    in_order = replace(by_cost, balanced_cost=None)
    skipped = ((50, 60),)

    def read(reader: BatchReader, num_replicas: int) -> tuple[dict[int, list[object]], list[list[int]], int]:
        plan = StepPlan(48, 24, size, Dealing(num_microbatches, num_replicas), skipped)
        steps = [reader.read_step(plan, replica) for replica in range(num_replicas)]
        found: dict[int, list[object]] = {}
        for step in steps:
            for number, batch in enumerate(step.microbatches):
                for place, sample in enumerate(batch.sample_B.tolist()):
                    if sample != NO_SAMPLE:
                        columns = (batch.tokens_SB, batch.labels_SB, batch.document_SB)
                        values = [None if column is None else column[:, place].tolist() for column in columns]
                        assert step.sources is not None
                        found[sample] = [*values, int(step.sources.source_MB[number, place])]
        dealt = [[sample for one in step.microbatches for sample in one.sample_B.tolist()] for step in steps]
        return found, dealt, sum(step.num_label_tokens for step in steps)

    expected = read(in_order, 1)
    for num_replicas in (1, 2, 3, 7):
        found = read(by_cost, num_replicas)
        assert found[0] == expected[0]
        assert found[2] == expected[2]
        assert found[1] != read(in_order, num_replicas)[1]
        assert found == read(by_cost, num_replicas)
    assert sorted(expected[0]) == [48, 49, *range(60, 82)]


def test_costs_count_the_multiplications_of_the_model() -> None:
    changes = {"num_layers": 6, "window_size": 8, "full_attention_every": 3, "num_kv_heads": 2}
    model = make_config({"model": changes}).model
    cost = document_cost(model)
    assert cost.windows == ((0, 2), (8, 4))
    pairs = sum(layers * attended_pairs(SEQ_LEN, window) for window, layers in cost.windows)
    per_pair = 4 * model.num_heads * model.resolved_head_dim  # scores and values, a multiplication and an addition
    flops = forward_flops_per_token(model) * SEQ_LEN
    assert per_pair * (cost.per_token * SEQ_LEN + pairs) == pytest.approx(flops, abs=per_pair * SEQ_LEN / 2)


def test_dry_run_states_the_imbalance_with_and_without_costs(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.planning.plan_text.dry_run", lambda _: "")  # the memory of ranks takes seconds
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    said = {}
    for options in (["--world-size", "4"], ["--world-size", "4", "--data.balance=none"], ["--world-size", "1"]):
        assert main(["config", "check", str(file), "--dry-run", *options]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "data.balance" in line]
        said[tuple(options[1:])] = lines
    assert said[("1",)] == []
    (on,), (off,) = said[("4",)], said[("4", "--data.balance=none")]
    assert on.partition(": ")[2] == off.partition(": ")[2]
    assert (on.partition(":")[0], off.partition(":")[0]) == ('  data.balance="cost"', '  data.balance="none"')
    found = re.search(r'takes ([\d.]+) times the mean with "none", ([\d.]+) with "cost" \(8 steps\)', on)
    assert found is not None
    in_order, by_cost = map(float, found.groups())
    assert 1.0 <= by_cost < in_order

    layout, cost = config.layout(4), document_cost(config.model)
    reader = replace(open_reader(config), balanced_cost=None)
    longest, mean = 0, 0.0
    for cursor in range(0, 8 * 24, 24):
        (plan,) = config.steps(layout, cursor, 1).plans()
        costs = [
            sum(int(reader.costs(np.array(slot), cost).sum()) for slot in plan.slots(replica)) for replica in range(4)
        ]
        longest, mean = longest + max(costs), mean + sum(costs) / 4
    assert in_order == pytest.approx(longest / mean, abs=5e-4)
