"""Readings of GPUs and links as evidence in the finding of a straggler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence
from megatrain_diagnostics.analysis.device_evidence import with_devices
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.controller.device_watch import DeviceFindings
from megatrain_diagnostics.devices.rows import HostPlace, device_tables
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.events.tables import Gpus, NetworkLinks, joined
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading
from megatrain_job.devices.links import LinkReading
from tests.helpers.memory_events import MemoryEvents

FINDING = Finding(
    cause=Cause.COMPUTE, confidence=VerdictConfidence.HIGH, ranks=(5,), hosts=("host-2",), first_step=1200,
    last_step=1300, num_steps=100, num_seen=100, excess=0.3, excess_s=0.1, score=9.0, wait_deficit_s=0.1, num_peers=7,
    victims=(), num_victims=0, step_s=1.0, gain_s=0.1, evidence=("rank 5 computes longer",),
)  # fmt: skip
GPU = GpuReading(
    3, "GPU-c", temperature_c=70.0, slowdown_temperature_c=89.0, sm_clock_mhz=1410.0, max_sm_clock_mhz=1410.0,
    throttle_reasons=0,
)  # fmt: skip
HOT = replace(GPU, temperature_c=91.0, sm_clock_mhz=1050.0, throttle_reasons=0x41)
LINK = LinkReading("mlx5_0:1", True, "ACTIVE", 400_000.0, num_downs=2, rx_errors=5, symbol_errors=0)


def events(*readings: tuple[int, GpuReading | LinkReading]) -> MemoryEvents:
    """Return the rows of (step, reading), ten seconds apart."""
    found: dict[Any, list[Any]] = {Gpus: [], NetworkLinks: []}
    for number, (step, reading) in enumerate(readings):
        at_s = 1_800_000_000.0 + 10 * number
        is_gpu = isinstance(reading, GpuReading)
        sample = HostSample(
            at_s, 0.0, DriverReading("nvml", gpus=(reading,) if is_gpu else ()), () if is_gpu else (reading,)
        )
        for kind, table in device_tables(sample, HostPlace("host-2", 1, step, {"GPU-c": (5, step)})):
            found[kind].append(table)
    return MemoryEvents({kind: joined(kind, tables) for kind, tables in found.items()})


@pytest.mark.parametrize(
    ("cause", "readings", "sentence"),
    [
        (
            Cause.COMPUTE, [(1100, GPU), (1150, GPU), (1200, HOT), (1250, HOT), (1300, HOT)],
            (
                "its GPU 3 of host-2 (rank 5): SM clock 1,410 MHz -> 1,050 MHz since step 1200 (reported if "
                "it drops by 5 % or more), hardware thermal slowdown, 91 C (it slows down at 89 C)"
            ),
        ),
        (
            Cause.COMPUTE, [(1210, HOT), (1250, HOT)],
            (
                "its GPU 3 of host-2 (rank 5): SM clock 1,410 MHz -> 1,050 MHz (reported if it drops by 5 % or more), "
                "hardware thermal slowdown, 91 C (it slows down at 89 C)"
            ),
        ),
        (
            Cause.COMPUTE, [(1100, GPU), (1250, replace(GPU, sm_clock_mhz=1395.0))],
            (
                "its GPU 3 of host-2 (rank 5): SM clock 1,395 MHz as before, not throttled, 70 C: the clock is not the "
                "cause"
            ),
        ),
        (
            Cause.COMPUTE, [(1100, GPU), (1250, GpuReading(3, "GPU-c", error="GPU is lost"))],
            "its GPU 3 of host-2 (rank 5) does not answer its driver: GPU is lost",
        ),
        (
            Cause.COMPUTE, [(1250, GpuReading(3, "GPU-c", temperature_c=70.0))],
            "its GPU 3 of host-2 (rank 5): its SM clock is not known; throttle reasons not known, 70 C",
        ),
        (
            Cause.NETWORK, [(1100, LINK), (1250, replace(LINK, speed_mbps=100_000.0))],
            "link mlx5_0:1 of host-2 runs at 100 Gbit/s, down from 400",
        ),
        (
            Cause.NETWORK, [(1100, LINK), (1250, replace(LINK, rx_errors=1205)), (1300, replace(LINK, rx_errors=7))],
            "link mlx5_0:1 of host-2 had 1,207 errors (threshold: 100) and changed its state 0 times",
        ),
        (Cause.NETWORK, [(1100, LINK), (1250, LINK)], ""),
        (Cause.DATA, [(1100, GPU), (1200, HOT)], ""),
        (Cause.COMPUTE, [], ""),
    ],
)  # fmt: skip
def test_device_evidence_of_a_finding(cause: Cause, readings: list[Any], sentence: str) -> None:
    found = with_devices(events(*readings), replace(FINDING, cause=cause), 1)
    assert found.evidence == ("rank 5 computes longer", *([sentence] if sentence else []))


def test_devices_of_other_ranks_and_rounds_are_no_evidence() -> None:
    readings = events((1100, GPU), (1200, HOT))
    assert with_devices(readings, FINDING, 2).evidence == FINDING.evidence
    assert with_devices(readings, replace(FINDING, ranks=(6,)), 1).evidence == FINDING.evidence
    assert with_devices(readings, FINDING, 1, first_ns=2 * 10**18).evidence == FINDING.evidence


def test_device_readings_are_kept_for_a_while() -> None:
    class Counted(MemoryEvents):
        num_reads = 0

        def read(self, *arguments: Any) -> Any:
            self.num_reads += 1
            return super().read(*arguments)

    held = events((1100, GPU), (1200, HOT))
    counted = Counted(held._tables)
    findings = DeviceFindings(counted, lambda: 1_800_000_000 * 10**9)
    first = findings.with_devices(FINDING, 1)
    assert len(first.evidence) == 2
    assert findings.with_devices(replace(FINDING, last_step=1400), 1).evidence == first.evidence
    assert counted.num_reads == 2
    assert np.isfinite(counted.read(Gpus).sm_clock_mhz).all()
