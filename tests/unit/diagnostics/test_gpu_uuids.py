"""GPUs by local rank, from files as the driver writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_diagnostics.streamer.host_devices import driver_uuids, gpu_uuids

A, B, C = (f"GPU-{letter * 8}-0000-1111-2222-{letter * 12}" for letter in "abc")


@pytest.fixture
def driver_files(tmp_path: Path) -> Path:
    for address, uuid in (("0000:41:00.0", B), ("0000:07:00.0", A), ("0000:c1:00.0", C)):
        (tmp_path / address).mkdir()
        (tmp_path / address / "information").write_text(
            f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 12\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00\n"
        )
    return tmp_path


def test_gpus_are_counted_as_cuda_does(driver_files: Path) -> None:
    for visible, expected in (
        (None, (A, B, C)),
        ("2,0", (C, A)),
        (f" {B} ,GPU-cccccccc", (B, C)),
        ("", ()),
        ("1,7,0", (B,)),
        (f"MIG-1,MIG-2,MIG-{C}/1/0", (B, "", C)),
    ):
        assert gpu_uuids(visible, driver_uuids(driver_files), {"MIG-1": B}) == expected, visible
    assert gpu_uuids(None, driver_uuids(driver_files / "nothing")) == (), "without a driver"
