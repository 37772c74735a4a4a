"""Records of the GPU benchmark on a machine that may have no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_stage
from benchmarks.gpu_record import GpuRecord


@pytest.fixture
def record(tmp_path: Path) -> GpuRecord:
    return GpuRecord.begin(tmp_path, "python3 -m benchmarks.gpu")


@pytest.fixture
def _usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stage, "is_device_usable", lambda: True)
    monkeypatch.setattr(gpu_stage, "release", lambda: None)
