"""The check of the GPU reader, with a library and a nvidia-smi that agree, or do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_devices import FIELDS, RECORDED, check_devices
from benchmarks.gpu_record import GpuRecord
from tests.helpers.fake_nvml import fake_nvml

PRINTED = {
    "temperature.gpu": "60", "clocks.max.sm": "1980", "clocks.max.memory": "2619", "enforced.power.limit": "700.00",
    "memory.total": "81559", "memory.used": "57220", "ecc.errors.corrected.volatile.total": "0",
    "ecc.errors.uncorrected.volatile.total": "0", "ecc.errors.uncorrected.aggregate.total": "0",
    "remapped_rows.uncorrectable": "0",
}  # fmt: skip


@pytest.mark.slow(kept=["changed1-failed1"])
@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({}, []),
        ({"clocks.max.sm": "1755"}, ["clocks.max.sm of GPU-00000000: ours 1980, nvidia-smi 1755"]),
        (
            {"remapped_rows.uncorrectable": "[N/A]"},
            ["remapped_rows.uncorrectable of GPU-00000000: ours 0, nvidia-smi [N/A]"],
        ),
    ],
)
def test_each_field_is_compared(
    changed: dict[str, str], failed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = fake_nvml(tmp_path, 1)
    program = tmp_path / "nvidia-smi"
    row = ", ".join(["GPU-00000000", *({**PRINTED, **changed}[field] for field in FIELDS)])
    program.write_text(f"#!/bin/sh\necho '{row}'\n")
    program.chmod(0o755)
    for name, value in {**nvml.environment, "PATH": f"{tmp_path}:/usr/bin:/bin"}.items():
        monkeypatch.setenv(name, value)
    GpuRecord.begin(tmp_path, "a test")
    stage = GpuRecord.read(tmp_path).stage("devices")
    check_devices(stage, 30.0)
    assert stage.content["failed"] == failed
    assert len(stage.content["found"]) == len(FIELDS)
    assert len((tmp_path / RECORDED).read_text().splitlines()) == 3
