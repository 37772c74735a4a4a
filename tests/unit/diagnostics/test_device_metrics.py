"""Metrics of GPUs and links, read with Prometheus' own parser."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.metrics.device_metrics import MAX_GPUS, MAX_LINKS
from megatrain_diagnostics.metrics.exposition import HostCollector, registry_of
from megatrain_diagnostics.metrics.readings import DevicesReading
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading
from megatrain_job.devices.links import LinkReading
from tests.helpers.metric_readings import make_host_reading

GPU = GpuReading(
    3, "GPU-c", "H100", uncorrected_errors=2, corrected_errors=7, temperature_c=91.0, sm_clock_mhz=1050.0,
    throttle_reasons=0x44, power_w=412.5, memory_used_bytes=10, utilization=0.5, corrected_rows=1, uncorrected_rows=0,
    pcie_replays=4, is_row_remap_pending=True,
)  # fmt: skip
LINK = LinkReading("mlx5_0:1", True, "ACTIVE", 400_000.0, 2, rx_errors=5, symbol_errors=6)
DEVICES = DevicesReading(
    HostSample(1.0, 0.0, DriverReading("nvml", gpus=(GPU, GpuReading(4, error="GPU is lost"))), (LINK,)),
    xids={("GPU-c", 79): 1, ("GPU-c", 119): 2, ("GPU-c", 31): 5},
)


def families(devices: DevicesReading | None) -> dict[str, Metric]:
    text = generate_latest(registry_of(HostCollector(lambda: replace(make_host_reading(), devices=devices)))).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(name: str, devices: DevicesReading = DEVICES) -> dict[tuple[str, ...], float]:
    """Return the samples of a metric by their labels, without those of job and host."""
    found = families(devices)[name].samples
    return {tuple(value for key, value in one.labels.items() if key not in ("job_name", "host")): one.value
            for one in found}  # fmt: skip


def test_device_values_are_exposed_in_base_units() -> None:
    assert values("megatrain_gpu_sm_clock_hertz") == {("3",): 1.05e9}
    assert values("megatrain_gpu_temperature_celsius") == {("3",): 91.0}
    assert values("megatrain_gpu_power_watts") == {("3",): 412.5}
    assert values("megatrain_gpu_reset_pending") == {("3",): 1.0}
    assert values("megatrain_gpu_lost") == {("3",): 0.0, ("4",): 1.0}
    assert values("megatrain_gpu_info") == {("3", "H100", "GPU-c"): 1.0, ("4", "", ""): 1.0}
    assert values("megatrain_gpu_ecc_errors") == {("3", "corrected"): 7.0, ("3", "uncorrected"): 2.0}
    assert values("megatrain_gpu_pcie_replays") == {("3",): 4.0}
    assert values("megatrain_link_speed_bits_per_second") == {("mlx5_0:1",): 4e11}
    assert values("megatrain_link_errors") == {("rx-errors", "mlx5_0:1"): 5.0, ("symbol-errors", "mlx5_0:1"): 6.0}
    assert values("megatrain_gpu_xids") == {("3", "hardware"): 3.0, ("3", "program"): 5.0}
    held = {key for key, value in values("megatrain_gpu_throttled").items() if value}
    assert held == {("3", "power-cap"), ("3", "hardware-thermal-slowdown")}


def test_names_and_labels_follow_the_conventions() -> None:
    for name, family in families(DEVICES).items():
        assert name.startswith("megatrain_")
        assert family.documentation
        assert all(sample.name.endswith("_total") for sample in family.samples if family.type == "counter"), name
    labels = {label for family in families(DEVICES).values() for sample in family.samples for label in sample.labels}
    assert labels <= {
        *("job_name", "host", "rank", "dp", "pp", "tp", "gpu_uuid", "table", "reason", "version"),
        *("gpu", "gpu_name", "kind", "link", "producer"),
    }


def test_number_of_device_series_is_bounded() -> None:
    gpus = tuple(replace(GPU, index=number, uuid=f"GPU-{number}") for number in range(500))
    links = tuple(replace(LINK, name=f"eth{number}") for number in range(500))
    xids = {(f"GPU-{gpu}", number): 1 for gpu in range(500) for number in range(1, 200)}
    found = families(DevicesReading(HostSample(1.0, 0.0, DriverReading("nvml", gpus=gpus), links), xids=xids))
    assert len(found["megatrain_gpu_info"].samples) == MAX_GPUS
    assert len(found["megatrain_link_up"].samples) == MAX_LINKS
    assert len(found["megatrain_gpu_xids"].samples) <= 4 * (MAX_GPUS + 1)
    assert sum(len(family.samples) for family in found.values()) < 1000


def test_unanswered_driver_is_exposed() -> None:
    assert values("megatrain_telemetry_up") == {(): 1.0}
    assert values("megatrain_telemetry_up", replace(DEVICES, problem="no answer")) == {(): 0.0}
    assert values("megatrain_telemetry_up", DevicesReading()) == {(): 0.0}
    assert not [name for name in families(None) if "gpu_" in name or "telemetry" in name]
