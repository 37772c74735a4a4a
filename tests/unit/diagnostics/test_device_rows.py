"""Rows of devices: ranks of a GPU, unknown values, what the daemon accepts; and evidence of a straggler."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatrain.contracts.records.host_verdict import Cause, VerdictConfidence
from megatrain_diagnostics.analysis.device_evidence import with_devices
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.collector.admission import Admission, RowRateLimiter
from megatrain_diagnostics.collector.rounds_known import KnownRounds
from megatrain_diagnostics.controller.device_watch import DeviceFindings
from megatrain_diagnostics.devices.rows import MAX_DEVICES, HostPlace, device_tables
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.events.tables import Gpus, NetworkLinks, Xids, joined, num_rows
from megatrain_diagnostics.streamer.host_devices import HostDevices, driver_uuids, gpu_uuids
from megatrain_diagnostics.wire.messages import BatchHeader, batch_bytes
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading, XidEvent
from megatrain_job.devices.links import LinkReading
from tests.helpers.memory_events import MemoryEvents

GPU = GpuReading(
    3, "GPU-c", temperature_c=91.0, is_row_remap_pending=True, has_row_remap_failed=False, throttle_reasons=0x40
)
SAMPLE = HostSample(
    1_800_000_000.5,
    0.01,
    DriverReading("nvml", gpus=(GPU, GpuReading(4, error="GPU is lost"))),
    (LinkReading("mlx5_0:1", True, "ACTIVE", 400_000.0, 2, symbol_errors=9),),
    (XidEvent(1_800_000_000.25, "GPU-c", 79),),
)
PLACE = HostPlace("host-2", round=4, step=1199, ranks={"GPU-c": (19, 1200)})


def tables(sample: HostSample = SAMPLE) -> dict[Any, Any]:
    return dict(device_tables(sample, PLACE))


def test_gpu_rows_name_their_ranks_and_unknown_values_are_nan() -> None:
    gpus = tables()[Gpus]
    assert (gpus.rank.tolist(), gpus.step.tolist(), gpus.gpu.tolist()) == ([19, -1], [1200, 1199], [3, 4])
    assert (gpus.temperature_c[0], gpus.is_reset_pending[0], gpus.has_remap_failed[0]) == (91.0, 1.0, 0.0)
    assert math.isnan(gpus.power_w[0])
    assert gpus.error.tolist() == ["", "GPU is lost"]
    links, xids = tables()[NetworkLinks], tables()[Xids]
    assert (links.link[0], links.symbol_errors[0], links.step[0]) == ("mlx5_0:1", 9.0, 1199)
    assert (xids.xid[0], xids.gpu[0], xids.rank[0], xids.at_ns[0]) == (79, 3, 19, int(1_800_000_000.25 * 1e9))


def test_number_of_device_rows_is_bounded() -> None:
    assert tables(HostSample(1.0, 0.0)) == {}
    many = DriverReading("nvml", gpus=tuple(GpuReading(number) for number in range(1000)), error="one is lost")
    gpus = tables(replace(SAMPLE, driver=many))[Gpus]
    assert num_rows(gpus) == MAX_DEVICES + 1
    assert (gpus.gpu[-1], gpus.error[-1]) == (-1, "one is lost")


def test_daemon_admits_device_rows_with_and_without_a_round() -> None:
    rounds = KnownRounds()
    rounds.add(9, 32)  # the host's round is long over: its devices still count
    admission = Admission(rounds, RowRateLimiter())
    for place in (PLACE, HostPlace("host-2")):
        for kind, table in device_tables(SAMPLE, place):
            header = BatchHeader(kind.NAME, 0, 1_800_000_001 * 10**9)
            admitted = admission.admit("host-2", header, batch_bytes(table))
            assert dict(admitted.refused) == {}, (place, kind)
            assert num_rows(admitted.live) == num_rows(table)


class Source:
    """Returns prepared samples, each once."""

    problem = ""

    def __init__(self, *samples: HostSample) -> None:
        self._samples = list(samples)
        self.newest = samples[-1] if samples else None

    def take(self) -> list[HostSample]:
        taken, self._samples = self._samples, []
        return taken


def tail(rank: int, step: int) -> Any:
    identity = SimpleNamespace(rank=rank, round=4)
    return SimpleNamespace(identity=identity, progress=SimpleNamespace(current_step=step, completed_step=step - 1))


@pytest.mark.parametrize(
    ("visible", "ranks"), [(None, [16, 17, -1]), ("2,0", [17, -1, 16]), ("MIG-b1,GPU-a", [17, 16, -1])]
)
def test_ranks_are_found_by_the_gpus_that_they_see(visible: str | None, ranks: list[int]) -> None:
    gpus = (GpuReading(0, "GPU-a"), GpuReading(1, "GPU-b", mig_uuids=("MIG-b1",)), GpuReading(2, "GPU-c"))
    devices = HostDevices("host-2", visible, Source(replace(SAMPLE, driver=DriverReading("nvml", gpus=gpus))))
    found: Any = dict(devices.poll([tail(17, 8), tail(16, 9)], 4, 0))[Gpus]
    assert found.rank.tolist() == ranks
    assert {-1: 9, **dict(zip(found.rank.tolist(), found.step.tolist(), strict=True))} == {16: 9, 17: 8, -1: 9}
    assert devices.reading is not None
    assert dict(devices.reading.xids) == {("GPU-c", 79): 1}


def test_lost_gpu_still_belongs_to_its_rank() -> None:
    """NVML does not report the UUID of a GPU that it cannot reach."""
    first = replace(
        SAMPLE, driver=DriverReading("nvml", gpus=(GpuReading(0, "GPU-a"), GpuReading(1, "GPU-b"))), xids=()
    )
    lost = (GpuReading(0, "GPU-a"), GpuReading(1, error="GPU is lost"))
    then = replace(first, driver=DriverReading("nvml", gpus=lost), xids=(XidEvent(1.0, "GPU-b", 79),))
    devices = HostDevices("host-2", None, Source(first, then))
    found = devices.poll([tail(16, 9), tail(17, 9)], 4, 0)
    gpus, xids = ([table for kind, table in found if kind is wanted][-1] for wanted in (Gpus, Xids))
    assert (gpus.rank.tolist(), gpus.error.tolist()) == ([16, 17], ["", "GPU is lost"])
    assert (xids.gpu.tolist(), xids.rank.tolist()) == ([1], [17])


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


FINDING = Finding(
    cause=Cause.COMPUTE, confidence=VerdictConfidence.HIGH, ranks=(5,), hosts=("host-2",), first_step=1200,
    last_step=1300, num_steps=100, num_seen=100, excess=0.3, excess_s=0.1, score=9.0, wait_deficit_s=0.1, num_peers=7,
    victims=(), num_victims=0, step_s=1.0, gain_s=0.1, evidence=("rank 5 computes longer",),
)  # fmt: skip
SLOW_GPU = GpuReading(
    3, "GPU-c", temperature_c=70.0, slowdown_temperature_c=89.0, sm_clock_mhz=1410.0, max_sm_clock_mhz=1410.0,
    throttle_reasons=0,
)  # fmt: skip
HOT = replace(SLOW_GPU, temperature_c=91.0, sm_clock_mhz=1050.0, throttle_reasons=0x41)
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
            Cause.COMPUTE, [(1100, SLOW_GPU), (1150, SLOW_GPU), (1200, HOT), (1250, HOT), (1300, HOT)],
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
            Cause.COMPUTE, [(1100, SLOW_GPU), (1250, replace(SLOW_GPU, sm_clock_mhz=1395.0))],
            (
                "its GPU 3 of host-2 (rank 5): SM clock 1,395 MHz as before, not throttled, 70 C: the clock is not the "
                "cause"
            ),
        ),
        (
            Cause.COMPUTE, [(1100, SLOW_GPU), (1250, GpuReading(3, "GPU-c", error="GPU is lost"))],
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
        (Cause.DATA, [(1100, SLOW_GPU), (1200, HOT)], ""),
        (Cause.COMPUTE, [], ""),
    ],
)  # fmt: skip
def test_device_evidence_of_a_finding(cause: Cause, readings: list[Any], sentence: str) -> None:
    found = with_devices(events(*readings), replace(FINDING, cause=cause), 1)
    assert found.evidence == ("rank 5 computes longer", *([sentence] if sentence else []))


def test_devices_of_other_ranks_and_rounds_are_no_evidence() -> None:
    readings = events((1100, SLOW_GPU), (1200, HOT))
    assert with_devices(readings, FINDING, 2).evidence == FINDING.evidence
    assert with_devices(readings, replace(FINDING, ranks=(6,)), 1).evidence == FINDING.evidence
    assert with_devices(readings, FINDING, 1, first_ns=2 * 10**18).evidence == FINDING.evidence


def test_device_readings_are_kept_for_a_while() -> None:
    class Counted(MemoryEvents):
        num_reads = 0

        def read(self, *arguments: Any) -> Any:
            self.num_reads += 1
            return super().read(*arguments)

    held = events((1100, SLOW_GPU), (1200, HOT))
    counted = Counted(held._tables)
    findings = DeviceFindings(counted, lambda: 1_800_000_000 * 10**9)
    first = findings.with_devices(FINDING, 1)
    assert len(first.evidence) == 2
    assert findings.with_devices(replace(FINDING, last_step=1400), 1).evidence == first.evidence
    assert counted.num_reads == 2
    assert np.isfinite(counted.read(Gpus).sm_clock_mhz).all()
