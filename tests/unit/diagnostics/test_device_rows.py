"""Rows of devices: the ranks of a GPU, unknown values, and what the daemon accepts."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_diagnostics.collector.admission import Admission, RowRateLimiter
from megatrain_diagnostics.collector.rounds_known import KnownRounds
from megatrain_diagnostics.devices.rows import MAX_DEVICES, HostPlace, device_tables
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.events.tables import Gpus, NetworkLinks, Xids, num_rows
from megatrain_diagnostics.streamer.host_devices import HostDevices
from megatrain_diagnostics.wire.messages import BatchHeader, batch_bytes
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading, XidEvent
from megatrain_job.devices.links import LinkReading

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
    ("visible", "ranks"),
    [(None, [16, 17, -1]), ("2,0", [17, -1, 16]), ("MIG-b1,GPU-a", [17, 16, -1])],
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
