"""Costs of documents in a file: how they are written and checked, what samples cost, and how a run deals by them."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megatrain.cli import main
from megatrain.commands import data
from megatrain.config.config import Config
from megatrain.config.serialize import to_toml
from megatrain.contracts.errors import DataError
from megatrain.contracts.step_plan import Dealing, StepPlan
from megatrain.data.balance import replica_costs
from megatrain.data.bins import write_bins
from megatrain.data.costs import COSTS_HEADER, DocumentCosts, costs_path, write_costs
from megatrain.data.indexed import IndexedDataset
from megatrain.data.order import order_of
from megatrain.data.verification import verify_data
from megatrain.training.training_data import open_reader
from tests.helpers.training_case import make_config

SEQ_LEN = 16
VOCAB_SIZE = 90
LENGTHS = np.minimum(60, np.random.default_rng(1).lognormal(1.8, 1.2, 400).astype(np.int64) + 1)
COSTS = np.random.default_rng(2).integers(0, 10_000, len(LENGTHS)).tolist()


@pytest.fixture
def dataset(write_tokens: Callable[..., Path]) -> IndexedDataset:
    random = np.random.default_rng(3)
    documents = [random.integers(0, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    return IndexedDataset(write_tokens(documents, "train", VOCAB_SIZE), VOCAB_SIZE)


@pytest.fixture
def with_costs(dataset: IndexedDataset) -> IndexedDataset:
    write_costs(dataset, map(str, COSTS), "costs")
    return dataset


@pytest.fixture(params=["none", "best_fit"])
def config(request: pytest.FixtureRequest, with_costs: IndexedDataset) -> Config:
    write_bins(with_costs, SEQ_LEN)
    has_mask = request.param != "none"
    keys = {"train": "", "has_document_mask": has_mask, "packing": request.param, "balance": "file"}
    source = {"path": str(with_costs.prefix), "name": "web"}
    return make_config({"data": keys, "data_source": source, "batch": {"global_batch_size": 24}})


def costs_file(dataset: IndexedDataset) -> Path:
    return costs_path(Path(str(dataset.prefix)))


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    return data.run(parser.parse_args(["costs", *map(str, arguments)]))


@pytest.mark.parametrize("is_stream", [False, True])
def test_command_stores_the_cost_of_each_document(
    is_stream: bool,
    dataset: IndexedDataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, file = "".join(f"{cost}\n" for cost in COSTS), tmp_path / "costs.txt"
    file.write_text(text)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    arguments = (dataset.prefix, "--input", "-" if is_stream else file)
    assert run(*arguments) == 0
    assert "train.costs: 400 documents, costs from a mean of" in capsys.readouterr().out
    assert DocumentCosts(dataset).read(0, 400).tolist() == COSTS
    with pytest.raises(DataError, match=r"train.costs: exists; replace it with --force"):
        run(*arguments)
    assert run(dataset.prefix, "--input", file, "--force", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_documents"], found["total"], found["largest"]) == (400, sum(COSTS), max(COSTS))


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["1"] * 399, r"costs.txt: has 399 costs, and .*train has 400 documents; give one cost a line"),
        (["1"] * 401, "has 401 costs"),
        (
            ["1"] * 16 + ["0.5"],
            r"costs.txt, line 17: '0.5' is not an integer from 0 to 4294967295; choose another unit",
        ),
        (["-1"], "line 1: '-1' is not"),
        (["4294967296"], "line 1: '4294967296' is not"),
        (["1", ""], "line 2: '' is not"),
    ],
)
def test_wrong_costs_are_named_by_their_line(lines: list[str], problem: str, with_costs: IndexedDataset) -> None:
    before = costs_file(with_costs).read_bytes()
    with pytest.raises(DataError, match=problem):
        write_costs(with_costs, lines, "costs.txt")
    assert costs_file(with_costs).read_bytes() == before
    assert not list(costs_file(with_costs).parent.glob(".*"))


def test_costs_of_another_corpus_are_refused(with_costs: IndexedDataset, write_tokens: Callable[..., Path]) -> None:
    other = IndexedDataset(write_tokens([[1, 2, 3]] * 400, "other", VOCAB_SIZE))
    with pytest.raises(DataError, match=r"other.costs: does not exist; make it with `megatrain data costs .*other --i"):
        DocumentCosts(other)
    costs_file(other).write_bytes(costs_file(with_costs).read_bytes())
    with pytest.raises(DataError, match=r"other.costs: was made for data with digest .*; make it again: "):
        DocumentCosts(other)


def test_damage_of_any_byte_is_noticed(with_costs: IndexedDataset) -> None:
    path = costs_file(with_costs)
    assert not verify_data(Path(str(with_costs.prefix)), VOCAB_SIZE)[0].problems
    content = path.read_bytes()
    others = np.random.default_rng(4).integers(COSTS_HEADER.size, len(content), 20).tolist()
    for place in [*range(COSTS_HEADER.size), *others]:
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        (pair,) = verify_data(Path(str(with_costs.prefix)), VOCAB_SIZE)
        assert [problem.file for problem in pair.problems] == [str(path)], place
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"train.costs: has \d+ bytes and costs of 400 documents"):
        DocumentCosts(with_costs)


@pytest.mark.parametrize("is_packed", [False, True])
def test_samples_have_the_costs_of_their_labels(is_packed: bool, with_costs: IndexedDataset) -> None:
    write_bins(with_costs, SEQ_LEN)
    order, costs = order_of(with_costs, SEQ_LEN, 7, is_packed=is_packed), DocumentCosts(with_costs)
    reader = open_reader(make_config({"data": {
        "train": str(with_costs.prefix), "has_document_mask": True, "balance": "file", "seed": 7,
        "packing": "best_fit" if is_packed else "none"}}))  # fmt: skip
    (source,) = reader.sources
    assert source is not None
    assert source.costs is not None
    assert source.costs.digest == costs.digest
    indices = np.arange(order.samples_per_epoch)
    found = reader.costs(indices, None)
    # by hand: each label of a document has the same part of its cost
    owner = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    of_label = [Fraction(cost, max(1, int(length) - is_packed)) for cost, length in zip(COSTS, LENGTHS, strict=True)]
    pieces = order.pieces(indices)
    for index, (first, end) in enumerate(zip(pieces.bounds[:-1].tolist(), pieces.bounds[1:].tolist(), strict=True)):
        labels = [
            owner[start : start + count]
            for start, count in zip(pieces.starts[first:end].tolist(), pieces.labels[first:end].tolist(), strict=True)
        ]
        exact = sum(of_label[document] for one in labels for document in one.tolist())
        assert abs(exact - int(found[index])) < sum(len(set(one.tolist())) for one in labels)
    if is_packed:  # each document is in an epoch once, as a whole or in pieces
        assert found.sum() == sum(cost for cost, length in zip(COSTS, LENGTHS.tolist(), strict=True) if length > 1)


def test_samples_are_dealt_by_the_costs_of_the_file(config: Config) -> None:
    reader = open_reader(config)
    plan = StepPlan(48, 24, 2, Dealing(12, 3))
    dealt, costs = reader.dealt(plan), reader.costs(np.arange(48, 72), None)
    assert sorted(dealt.order) == list(range(24))
    of_replicas = replica_costs(costs[list(dealt.order)], plan.dealing, 2)
    in_order = replica_costs(costs, plan.dealing, 2)
    assert of_replicas.max() - of_replicas.min() < in_order.max() - in_order.min()
    assert of_replicas.max() * 3 <= of_replicas.sum() * 1.02
    assert (
        not replace(reader, sources=tuple(replace(one, costs=None) for one in reader.sources if one)).dealt(plan).order
    )


def test_dry_run_states_the_imbalance_by_the_file(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.planning.plan_text.dry_run", lambda _: "")  # the memory of ranks takes seconds
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert main(["config", "check", str(file), "--dry-run", "--world-size", "4"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "data.balance" in one]
    assert 'data.balance="file": by the costs in the files, the replica that computes longest takes' in line
    assert 'with "file" (8 steps)' in line
