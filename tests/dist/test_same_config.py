"""Workers started with different configurations: under torchrun, only the workers can detect it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import distributed as dist

from megatrain.comm.rendezvous import Rendezvous
from megatrain.config.config import Config
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.process import Process
from megatrain.training.worker import _check_same_config
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
    _check_same_config(config, rendezvous_of(0, store))
    _check_same_config(config, rendezvous_of(1, store))
    with pytest.raises(ConfigError) as caught:
        _check_same_config(other, rendezvous_of(1, store))
    first, second = caught.value.problems
    layers = config.model.num_layers
    assert first.startswith(f"model.num_layers: rank 1 on host-1 has {layers + 1}, rank 0 has {layers}; start all")
    assert second.startswith(f"optimizer.lr: rank 1 on host-1 has 0.5, rank 0 has {config.optimizer.lr}; start all")
