"""A worker without a GPU on a host that has GPUs reports this before it binds to cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.process import Process
from megatrain.training.worker import run_worker
from tests.helpers.single_rank import make_config


@pytest.mark.parametrize("cpu_binding", ["none", "core", "numa"])
def test_more_workers_than_gpus_are_refused(cpu_binding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(*_: Any) -> None:
        raise AssertionError("bound to cores before it was refused")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("megatrain.training.worker.gpu_pci_address", bind)
    monkeypatch.setattr("megatrain.training.worker.bind_process", bind)
    unused: Any = None

    problem = r"worker 2 of this host has no GPU: the host has 2; start at most 2 workers here"
    with pytest.raises(ConfigError, match=problem):
        run_worker(make_config(runtime={"cpu_binding": cpu_binding}), Process(2, 4, 2, 4), unused, unused)


def test_a_gpu_that_is_asked_for_and_absent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    unused: Any = None

    with pytest.raises(ConfigError, match=r'runtime\.device="cuda": torch sees no CUDA device here'):
        run_worker(make_config(runtime={"device": "cuda"}), Process(), unused, unused)


def test_a_backend_of_gpus_is_refused_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    unused: Any = None

    with pytest.raises(ConfigError, match=r'kernels\.norm="apex" runs on GPUs only, and torch sees none here'):
        run_worker(make_config(kernels={"norm": "apex"}), Process(), unused, unused)
