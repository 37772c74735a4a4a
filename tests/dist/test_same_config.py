"""Workers started with different configurations or costs: only the workers can detect it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import distributed as dist

from megatrain.checkpoint_format.sample_stream import StreamSource
from megatrain.comm.rendezvous import Rendezvous
from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError, DataError
from megatrain.contracts.process import Process
from megatrain.data.costs import DocumentCosts, write_costs
from megatrain.data.indexed import IndexedDataset
from megatrain.data.order import SampleOrder
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.data.pictures.shard_samples import ShardSamples
from megatrain.data.training_source import TrainingSource
from megatrain.training.same_start import check_same_config, check_same_costs, check_same_pictures
from tests.helpers.picture_shards import TOKENIZER, write_shards
from tests.helpers.tiny_data import write_corpus
from tests.helpers.train_process import make_job


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_job(tmp_path / "job", {}).config


def rendezvous_of(rank: int, store: dist.Store) -> Rendezvous:
    return Rendezvous(Process(rank, 2, 0, 1, 0, "env://", "node-0:29500", host=f"host-{rank}"), store, "job/1")


def test_the_rank_that_differs_names_its_host_and_all_keys(config: Config) -> None:
    store = dist.HashStore()
    other = replace(
        config,
        optimizer=replace(config.optimizer, lr=0.5),
        model=replace(config.model, num_layers=config.model.num_layers + 1),
    )
    check_same_config(config, rendezvous_of(0, store))
    check_same_config(config, rendezvous_of(1, store))
    with pytest.raises(ConfigError) as caught:
        check_same_config(other, rendezvous_of(1, store))
    first, second = caught.value.problems
    layers = config.model.num_layers
    assert first.startswith(f"model.num_layers: rank 1 on host-1 has {layers + 1}, and rank 0 has {layers}; start all")
    assert second.startswith(f"optimizer.lr: rank 1 on host-1 has 0.5, and rank 0 has {config.optimizer.lr}; start all")


def test_costs_that_differ_are_named_with_their_host(tmp_path: Path) -> None:
    store, costs = dist.HashStore(), []
    for host in ("host-0", "host-1"):
        dataset = IndexedDataset(write_corpus(tmp_path / host / "web", 400, 90))
        write_costs(dataset, (str(number if host == "host-0" else 1) for number in range(dataset.num_documents)), host)
        identity, order = StreamSource("web", dataset.num_tokens), SampleOrder(dataset.num_tokens, 16, 1)
        costs.append([None, TrainingSource(identity, dataset, order, costs=DocumentCosts(dataset))])
    check_same_costs(costs[0], rendezvous_of(0, store))
    check_same_costs(costs[0], rendezvous_of(1, store))
    with pytest.raises(
        DataError, match=r"web.costs: rank 1 on host-1 has costs with digest \w+, and rank 0 has \w+; copy"
    ):
        check_same_costs(costs[1], rendezvous_of(1, store))


def test_pictures_that_differ_are_named_with_their_host(tmp_path: Path) -> None:
    store, made = dist.HashStore(), PictureFormat(24, 12)
    shards = [write_shards(tmp_path / f"host-{host}", 1 + host) for host in range(2)]
    first, second = (ShardSamples(one, made, one / TOKENIZER, "DALI 2.4.0 cpu") for one in shards)
    newer = ShardSamples(shards[0], made, shards[0] / TOKENIZER, "DALI 2.5.0 cpu")
    check_same_pictures([], rendezvous_of(0, store))
    check_same_pictures([first, first], rendezvous_of(0, store))
    check_same_pictures([first, first], rendezvous_of(1, store))
    with pytest.raises(DataError, match=r"pictures\.index: rank 1 on host-1 has the digest \w+, and rank 0 has \w+"):
        check_same_pictures([first, second], rendezvous_of(1, store))
    with pytest.raises(DataError, match=r"has pictures made by DALI 2\.5\.0 cpu.*, and rank 0 has DALI 2\.4\.0 cpu"):
        check_same_pictures([newer, first], rendezvous_of(1, store))
