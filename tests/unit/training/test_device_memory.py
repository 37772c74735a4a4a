"""A GPU's memory, by torch's counters: which values are logged, and when."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatrain.training.observers.device_memory import CudaMemory, HostMemory, device_memory
from tests.helpers.completed_steps import completed_step

GIB = 1 << 30


def statistics(**changes: int) -> dict[str, Any]:
    return {"allocated_bytes.all.peak": 60 * GIB, "reserved_bytes.all.peak": 64 * GIB, "num_alloc_retries": 0} | changes


def test_fullness_is_reported_once_when_the_first_steps_are_done() -> None:
    memory = CudaMemory(80 * GIB, statistics)
    reported = [memory.after_step(completed_step(index)) for index in range(100, 109)]

    assert reported == [
        "",
        "",
        "GPU memory: tensors took 60.0 GiB at most, torch holds 64.0 of 80.0 GiB",
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
