"""Figures of the GPU benchmark, without a GPU: each is written to disk when measured, and a failed one keeps the
others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_operator_stages, gpu_stage, gpu_target
from benchmarks.gpu_operator_case import OperatorCase, compiled
from benchmarks.gpu_operator_stages import operation
from benchmarks.gpu_record import GpuRecord, beside, markdown
from benchmarks.gpu_stage import BrokenDeviceError, described, fill


def raises(error: Exception) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


def test_every_figure_is_on_disk_when_it_is_found(record: GpuRecord, tmp_path: Path) -> None:
    record.stage("Ceilings").change(found={"copy, TB/s": 4.2})
    operations = record.stage("Memory-bound operations")
    row = operations.row(operation="rms_norm")
    row["ours, us"] = 50.0
    operations.row(operation="swiglu")["eager, us"] = "ValueError: no"
    operations.fail("swiglu is wrong")
    record.stage("Whole steps").change(note="not started: no time was left")

    again = GpuRecord.read(tmp_path)
    assert again.document == json.loads((tmp_path / "gpu.json").read_text()) == record.document
    assert again.stage("Memory-bound operations").row(operation="rms_norm") == row
    page = (tmp_path / "gpu.md").read_text()
    assert page == markdown(record.document)
    assert "- copy, TB/s: 4.2" in page
    assert "| operation | ours, us | eager, us |" in page
    assert "| swiglu |  | ValueError: no |" in page
    assert "    swiglu is wrong" in page
    assert "not started: no time was left" in page


def test_failed_side_stays_in_the_table() -> None:
    rows: list[dict[str, Any]] = [
        {"side": "a", "layers": 9, "seconds": "out of memory"},
        {"side": "a", "layers": 8, "seconds": 2.0},
        {"side": "b", "layers": 8, "seconds": 3.0},
        {"side": "b", "layers": 9, "seconds": 3.0},
        {"side": "c", "layers": 8},
    ]
    beside(rows, "seconds", "a")

    assert [row["seconds / a"] for row in rows] == ["", 1.0, 1.5, "", ""]
    counts: list[dict[str, Any]] = [
        {"side": "a", "layers": 9, "steps": 8, "mfu": "out of memory"},
        {"side": "b", "layers": 9, "steps": 8, "mfu": 0.25},
        {"side": "a", "layers": 7, "steps": 8, "mfu": 0.5},
    ]
    beside(counts, "mfu", "a", "steps")

    assert [row["mfu / a"] for row in counts] == ["", 0.5, 1.0]


@pytest.mark.usefixtures("_usable")
def test_a_figure_that_fails_is_reported_in_its_place(record: GpuRecord, tmp_path: Path) -> None:
    stage = record.stage("Some")
    row = stage.row(operation="x")
    fill(stage, row, "eager, us", raises(ValueError("no such | thing\nat all")), is_ours=False)
    fill(stage, row, "empty, us", raises(AssertionError()), is_ours=False)
    assert not stage.content["failed"]
    fill(stage, row, "ours, us", raises(ValueError("wrong")), is_ours=True)
    fill(stage, row, "seconds", lambda: {"seconds": 2.0, "mfu": 0.5}, is_ours=True)
    fill(stage, row, "large, us", raises(torch.OutOfMemoryError("CUDA out of memory. Tried")), is_ours=True)

    assert GpuRecord.read(tmp_path).stage("Some").content["found"] == [
        {
            "operation": "x",
            "eager, us": "ValueError: no such / thing",
            "empty, us": "AssertionError: ",
            "ours, us": "ValueError: wrong",
            "seconds": 2.0,
            "mfu": 0.5,
            "large, us": "out of memory: CUDA out of memory. Tried",
        }
    ]
    assert GpuRecord.read(tmp_path).stage("Some").content["failed"] == ["x, ours, us: ValueError: wrong"]


def test_too_little_memory_is_seen_inside_another_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("backend failed") from torch.OutOfMemoryError("CUDA out of memory")
    assert described(caught.value) == "out of memory: backend failed"
    assert described(RuntimeError("backend failed")) == "RuntimeError: backend failed"


def test_fatal_gpu_error_ends_the_process_once(record: GpuRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stage, "is_device_usable", lambda: False)
    monkeypatch.setattr(gpu_stage, "release", lambda: None)
    stage = record.stage("Some")
    row = stage.row(operation="x")
    with pytest.raises(BrokenDeviceError, match="illegal"):
        fill(stage, row, "ours, us", raises(RuntimeError("illegal access")), is_ours=True)
    fill(stage, row, "ours, us", raises(RuntimeError("never called")), is_ours=True)

    assert row == {"operation": "x", "ours, us": "RuntimeError: illegal access"}


@pytest.mark.usefixtures("_usable")
def test_failed_side_of_an_operation_leaves_the_others(record: GpuRecord) -> None:
    def seconds_of(work: Callable[[], float]) -> float:
        return work()

    def theirs(wrap: Callable[[Any], Any]) -> Callable[[], float]:
        if wrap is compiled:
            raise ValueError("cannot be compiled")
        return lambda: 4e-6

    target, stage = replace(gpu_target.gpu(), seconds_of=seconds_of), record.stage("Some")
    operation(stage, target, OperatorCase("x", 2000, lambda: lambda: 2e-6, theirs), bandwidth=2e9)
    operation(
        stage,
        target,
        OperatorCase("y", 2000, raises(ValueError("wrong")), theirs, why_not_compiled="one kernel"),
        bandwidth=None,
    )

    x, y = stage.content["found"]
    assert x == {
        "operation": "x",
        "ours, us": pytest.approx(2.0),
        "of copy bandwidth": pytest.approx(0.5),
        "eager, us": pytest.approx(4.0),
        "compiled, us": "ValueError: cannot be compiled",
        "eager / ours": pytest.approx(2.0),
        "compiled / ours": "",
    }
    assert (y["ours, us"], y["eager, us"], y["compiled, us"]) == (
        "ValueError: wrong",
        pytest.approx(4.0),
        "one kernel",
    )
    assert stage.content["failed"] == ["y, ours, us: ValueError: wrong"]


@pytest.mark.usefixtures("_usable")
def test_a_way_to_add_that_torch_does_not_have_leaves_the_others(
    record: GpuRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"ours": lambda: lambda: 2.0, "rounded": raises(TypeError("out_dtype")), "alone": lambda: lambda: 1.0}
    monkeypatch.setattr(gpu_operator_stages, "products", lambda *_: [("qkv", 4 * 10**12, ways)])
    stage = record.stage("Weights")
    gpu_operator_stages.weight_gradients(stage, replace(gpu_target.gpu(), seconds_of=lambda work: work()))

    assert stage.content["found"] == [
        {"gradient of": "qkv", "ours, TFLOP/s": 2.0, "rounded, TFLOP/s": "TypeError: out_dtype", "alone, TFLOP/s": 4.0}
    ]
    assert not stage.content["failed"]
