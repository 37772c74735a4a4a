"""GPUs read through NVIDIA's own binding, and network interfaces and RDMA ports read from the kernel's directories."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.contracts.records.record import decode
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_job.devices.gpu_readings import GpuReading
from megatrain_job.devices.links import LinkReading, read_links
from tests.helpers.fake_nvml import FakeNvml, fake_nvml
from tests.helpers.waiting import DEADLINE_S

PROGRAM = [sys.executable, "-m", "megatrain_diagnostics.devices", "--interval-s", "0.01"]
HEALTHY = GpuReading(
    0, "GPU-00000000", "NVIDIA H100 80GB HBM3",
    uncorrected_errors=0, is_row_remap_pending=False, has_row_remap_failed=False, pci_bus_id="0000:01:00.0",
    temperature_c=62.0, slowdown_temperature_c=89.0, memory_temperature_c=71.0, sm_clock_mhz=1980.0,
    max_sm_clock_mhz=1980.0, memory_clock_mhz=2619.0, throttle_reasons=0, power_w=612.345, power_limit_w=700.0,
    memory_used_bytes=60_000_000_000, memory_total_bytes=85_520_809_984, utilization=0.98, corrected_errors=0,
    lifetime_corrected_errors=3, lifetime_uncorrected_errors=0, corrected_rows=0, uncorrected_rows=0, nvlink_errors=0,
    pcie_replays=0,
)  # fmt: skip


def samples(nvml: FakeNvml | None, count: int = 1) -> tuple[list[HostSample], str]:
    """Run the program that reads devices; return its samples and its stderr."""
    environment = {**os.environ, **(nvml.environment if nvml else {})}
    arguments = [*PROGRAM, "--count", str(count)]
    end = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return [decode(HostSample, line, "a sample") for line in end.stdout.splitlines()], end.stderr


def test_program_ends_quietly_when_its_reader_is_gone() -> None:
    output, reader = os.pipe()[::-1]
    os.close(reader)
    try:
        end = subprocess.run(PROGRAM, stdout=output, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    finally:
        os.close(output)
    assert "BrokenPipeError" not in end.stderr


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return fake_nvml(tmp_path)


def test_each_field_equals_that_of_the_library(nvml: FakeNvml) -> None:
    nvml.say({0: {"retired_single": 2, "retired_double": 1, "page_pending": 0, "field.52": 5, "field.38": 2}})
    (sample,), _ = samples(nvml)
    assert (sample.driver.source, sample.driver.version, sample.driver.error) == ("nvml", "580.65.06", "")
    first = replace(HEALTHY, retired_pages=3, is_page_retirement_pending=False, nvlink_errors=7)
    second = replace(HEALTHY, index=1, uuid="GPU-00000001", pci_bus_id="0000:02:00.0")
    assert sample.driver.gpus == (first, second)


def test_gpu_with_few_fields_is_read(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    fake_nvml(tmp_path, 0)  # compiled, or skipped
    nvml.say({0: {"temperature": 40}}, gpus=1)
    (sample,), _ = samples(nvml)
    assert sample.driver.gpus == (
        GpuReading(0, HEALTHY.uuid, HEALTHY.name, pci_bus_id=HEALTHY.pci_bus_id, temperature_c=40.0),
    )


def test_a_lost_gpu_hides_no_other(nvml: FakeNvml) -> None:
    nvml.say({0: {"lost": 1}, 1: {"reasons": 0x48, "temperature": 91, "field.230": 1}})
    (sample,), _ = samples(nvml)
    lost, other = sample.driver.gpus
    assert lost == GpuReading(0, HEALTHY.uuid, HEALTHY.name, error="GPU is lost")
    assert (other.throttle_reasons, other.temperature_c, other.recovery_action) == (0x48, 91.0, "gpu reset")


def test_errors_are_reported_one_by_one_and_once(nvml: FakeNvml) -> None:
    nvml.say(xid_0=1048, xid_1=79)
    (first, second, third), _ = samples(nvml, 3)
    assert (first.xids, third.xids) == ((), ())
    assert [(xid.uuid, xid.number) for xid in second.xids] == [("GPU-00000001", 48), ("GPU-00000000", 79)]


def test_mig_devices_are_those_of_their_gpu(nvml: FakeNvml) -> None:
    nvml.say({0: {"mig": 1}, 1: {"mig": 0}})
    (sample,), _ = samples(nvml)
    assert [gpu.mig_uuids for gpu in sample.driver.gpus] == [("MIG-00000100", "MIG-00000101"), ()]


@pytest.mark.slow(kept=["no library"])
@pytest.mark.parametrize("case", ["no library", "no driver", "no GPU"])
def test_absence_of_gpus_is_reported_once(case: str, tmp_path: Path) -> None:
    nvml = None if case == "no library" else fake_nvml(tmp_path, 0)
    if nvml is not None and case == "no driver":
        nvml.say(driver=9)
    found, errors = samples(nvml, 3)
    assert [one.driver.gpus for one in found] == [(), (), ()]
    assert {one.driver.error for one in found} == {""}
    assert errors.count("no GPU is read") == 1


def write(directory: Path, values: dict[str, object]) -> None:
    for name, value in values.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


ETHERNET = {
    "operstate": "up", "speed": 100_000, "carrier_changes": 3, "device/vendor": "0x15b3", "statistics/rx_errors": 4,
    "statistics/tx_errors": 5, "statistics/rx_dropped": 6, "statistics/tx_dropped": 7,
}  # fmt: skip
PORT = {
    "state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "counters/link_downed": 1,
    "counters/port_rcv_errors": 2, "counters/local_link_integrity_errors": 3, "counters/port_xmit_discards": 4,
    "counters/symbol_error": 5, "counters/link_error_recovery": 6, "hw_counters/out_of_buffer": 7,
    "hw_counters/local_ack_timeout_err": 8, "hw_counters/packet_seq_err": 9,
}  # fmt: skip


def test_counters_of_hardware(tmp_path: Path) -> None:
    write(tmp_path / "class/net/ens1", ETHERNET)
    write(tmp_path / "class/net/docker0", {"operstate": "up", "statistics/rx_errors": 1})
    write(tmp_path / "class/infiniband/mlx5_0/ports/1", PORT)
    assert read_links(tmp_path) == (
        LinkReading("ens1", True, "up", 100_000.0, 3, 4, 5, 6, 7),
        LinkReading("mlx5_0:1", True, "ACTIVE, LinkUp", 400_000.0, 1, 2, 3, 7, 4, 11, 17),
    )


def test_interfaces_without_hardware_count_if_they_are_up(tmp_path: Path) -> None:
    write(tmp_path / "class/net/eth0", {"operstate": "up", "speed": 10_000})
    write(tmp_path / "class/net/tunl0", {"operstate": "down"})
    write(tmp_path / "class/net/lo", {"operstate": "unknown"})
    assert read_links(tmp_path) == (LinkReading("eth0", True, "up", 10_000.0, is_hardware=False),)


def test_value_that_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "class/net/ens1", {**ETHERNET, "speed": -1, "statistics/rx_errors": "N/A"})
    (link,) = read_links(tmp_path)
    assert (link.speed_mbps, link.rx_errors, link.tx_errors) == (None, None, 5)
    assert read_links(tmp_path / "nowhere") == ()
