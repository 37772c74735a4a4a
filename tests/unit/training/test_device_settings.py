"""A worker's device: settings before its first use, its memory in the log, and a host whose GPUs it does not use."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.process import Process
from megatrain.training.device_settings import (
    ALLOCATOR_VARIABLES,
    EXPANDABLE_SEGMENTS,
    set_allocator,
    use_all_queues,
    use_expandable_segments,
)
from megatrain.training.observers.device_memory import CudaMemory, HostMemory, device_memory
from megatrain.training.worker import run_worker
from tests.helpers.completed_steps import completed_step
from tests.helpers.single_rank import make_config


def test_segments_grow_unless_the_user_says_otherwise() -> None:
    given: list[str] = []
    assert use_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": ""}, given.append) == ""
    assert given == [EXPANDABLE_SEGMENTS]
    for name in ALLOCATOR_VARIABLES:
        reported = use_expandable_segments({name: "backend:cudaMallocAsync"}, given.append)
        assert reported == f"torch's allocator has the settings of {name}=backend:cudaMallocAsync"
    assert given == [EXPANDABLE_SEGMENTS]


def test_torch_accepts_the_allocator_settings() -> None:
    set_allocator(EXPANDABLE_SEGMENTS)
    with pytest.raises((RuntimeError, ValueError), match="perhaps"):
        set_allocator("expandable_segments:perhaps")


def test_number_of_queues_is_set_unless_the_user_set_it() -> None:
    for given, used, warns in (
        (None, "32", False),
        ("1", "1", True),
        ("8", "8", True),
        ("12", "12", False),
        ("many", "many", False),
    ):
        environment = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
        note = use_all_queues(environment)
        assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": used}
        assert note.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS={used} makes streams of a GPU wait") is warns, given
        assert bool(note) is warns, given


GIB = 1 << 30


def statistics(**changes: int) -> dict[str, Any]:
    return {"allocated_bytes.all.peak": 60 * GIB, "reserved_bytes.all.peak": 64 * GIB, "num_alloc_retries": 0} | changes


def test_fullness_is_reported_once_when_the_first_steps_are_done() -> None:
    memory = CudaMemory(80 * GIB, statistics)
    reported = [memory.after_step(completed_step(index)) for index in range(100, 109)]

    assert reported == [
        "",
        "",
        "GPU memory: tensors took at most 60.0 GiB, and torch held at most 64.0 of 80.0 GiB",
        *[""] * 6,
    ]
    assert memory.peak_bytes() == 60 * GIB


def test_retries_are_reported_each_time_they_double(caplog: pytest.LogCaptureFixture) -> None:
    retries = iter([0, 1, 1, 2, 3, 4, 5, 9, 9])
    memory = CudaMemory(80 * GIB, lambda: statistics(num_alloc_retries=next(retries)))
    with caplog.at_level(logging.WARNING):
        for index in range(9):
            memory.after_step(completed_step(index))

    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 2", "step 4", "step 6", "step 8"]
    assert "9 times" in caplog.records[-1].getMessage()
    assert "parallel.offload_layers" in caplog.records[-1].getMessage()


def test_statistics_before_the_first_allocation_are_empty() -> None:
    memory = CudaMemory(80 * GIB, dict)

    assert memory.peak_bytes() == 0
    assert memory.after_step(completed_step(0)) == ""


def test_cpu_process_reports_its_host_memory() -> None:
    memory = device_memory(torch.device("cpu"))

    assert isinstance(memory, HostMemory)
    assert memory.peak_bytes() > 10_000_000, "torch alone is more"
    assert memory.after_step(completed_step(2)) == ""


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
