"""The problems of GPUs and links that readings show; a driver that never answers blocks only its own process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.records.diag_records import DeviceProblem, DeviceProblemKind
from megatrain_diagnostics.controller.device_watch import DeviceWatch
from megatrain_diagnostics.devices.rows import HostPlace, device_tables
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.devices.supervisor import DeviceSupervisor
from megatrain_diagnostics.events.tables import Gpus
from megatrain_diagnostics.streamer.host_devices import HostDevices
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading, XidEvent
from megatrain_job.devices.links import LinkReading
from tests.helpers.fake_nvml import FakeNvml, fake_nvml
from tests.helpers.processes import descendants, words_of
from tests.helpers.waiting import DEADLINE_S, wait_until

NOW_S = 1_800_000_000.0
INTERVAL_S = 10.0
PLACE = HostPlace("host-2", round=4, step=1200, ranks={"GPU-c": (0, 1200)})
GPU = GpuReading(
    3, "GPU-c", uncorrected_errors=4, corrected_errors=10, nvlink_errors=0, pcie_replays=0, temperature_c=62.0,
    slowdown_temperature_c=89.0, sm_clock_mhz=1410.0, max_sm_clock_mhz=1410.0, throttle_reasons=0x4,
)  # fmt: skip
HOT = replace(GPU, temperature_c=91.0, sm_clock_mhz=1050.0, throttle_reasons=0x48)
LOST = GpuReading(3, error="GPU is lost")
LINK = LinkReading("mlx5_0:1", True, "ACTIVE", 400_000.0, num_downs=2, rx_errors=5, symbol_errors=0)

FAILING, DEGRADED = DeviceProblemKind.GPU_FAILING, DeviceProblemKind.GPU_DEGRADED
NETWORK, SILENT = DeviceProblemKind.NETWORK_DEGRADED, DeviceProblemKind.TELEMETRY_SILENT
Step = GpuReading | LinkReading | XidEvent | DriverReading


def sample(at_s: float, reading: Step) -> HostSample:
    if isinstance(reading, GpuReading):
        return HostSample(at_s, 0.0, DriverReading("nvml", gpus=(reading,)))
    if isinstance(reading, LinkReading):
        return HostSample(at_s, 0.0, links=(reading,))
    if isinstance(reading, XidEvent):
        return HostSample(at_s, 0.0, DriverReading("nvml", gpus=(GPU,)), xids=(replace(reading, at_unix_s=at_s),))
    return HostSample(at_s, 0.0, reading)


def watched(readings: Sequence[Step], interval_s: float = INTERVAL_S) -> DeviceWatch:
    """Return a watch after readings, one each interval, the last of them now."""
    watch = DeviceWatch(lambda: interval_s)
    for number, reading in enumerate(readings):
        at_s = NOW_S - interval_s * (len(readings) - 1 - number)
        watch.tick(at_s)
        for _, table in device_tables(sample(at_s, reading), PLACE):
            watch.consume(table)
    return watch


def xid(number: int) -> XidEvent:
    return XidEvent(0.0, "GPU-c", number)


CASES: dict[str, tuple[Sequence[Step], DeviceProblemKind | None, str]] = {
    "all is well": ([GPU, GPU, LINK, LINK], None, ""),
    "a power limit is no fault": ([replace(GPU, throttle_reasons=0x4)] * 9, None, ""),
    "heat for a moment": ([HOT, HOT, GPU], None, ""),
    "heat that lasts": (
        [GPU, HOT, HOT, HOT, HOT], DEGRADED,
        (
            r"GPU 3 of host-2 \(rank 0\) is slowed down: hardware slowdown, hardware thermal slowdown, 91 C, it slows "
            r"down at 89 C, SM clock 1,050 MHz of 1,410 MHz"
        ),
    ),
    "heat that lasts while the GPU does not answer once": ([HOT, HOT, LOST, HOT], DEGRADED, "is slowed down"),
    "heat before the GPU is lost": ([*[HOT] * 4, LOST], FAILING, "not answer its driver"),
    "uncorrected errors": (
        [GPU, replace(GPU, uncorrected_errors=6)], FAILING, "had 2 uncorrected memory errors within the hour"
    ),
    "a counter that began again": (
        [GPU, replace(GPU, uncorrected_errors=1)], FAILING, "had 1 uncorrected memory error within",
    ),
    "a driver that was loaded again": ([GPU, replace(GPU, uncorrected_errors=0, corrected_errors=0)], None, ""),
    "a lost GPU": ([GPU, LOST], FAILING, "GPU 3 of host-2 .*not answer its driver: GPU is lost"),
    "a lost GPU that came back": ([GPU, LOST, GPU], None, ""),
    "the driver asks for a reset": ([replace(GPU, recovery_action="gpu reset")], FAILING, "asks for gpu reset"),
    "a row that cannot be remapped": ([replace(GPU, has_row_remap_failed=True)], FAILING, "could not be remapped"),
    "a row that waits": ([replace(GPU, is_row_remap_pending=True)], DEGRADED, "a reset of the GPU will retire"),
    "many corrected errors": (
        [GPU, replace(GPU, corrected_errors=1500)], DEGRADED, r"1,490 corrected memory errors .*threshold: 1,000"
    ),
    "some corrected errors": ([GPU, replace(GPU, corrected_errors=900)], None, ""),
    "errors of NVLink": ([GPU, replace(GPU, nvlink_errors=150)], DEGRADED, "150 NVLink errors"),
    "an Xid of the hardware": (
        [xid(79)], FAILING, r"GPU 3 .* \(rank 0\) reported Xid 79, the GPU has fallen off the bus: evict the host",
    ),
    "an Xid that the GPU driver handled": ([xid(94)], DEGRADED, "Xid 94"),
    "an Xid of a program": ([xid(31), xid(43), xid(45)], None, ""),
    "the driver of all GPUs": ([GPU, DriverReading("nvml", error="no answer")], SILENT, "of host-2: no answer"),
    "the driver answers again": ([DriverReading("nvml", error="no answer"), GPU], None, ""),
    "a link that went down": ([LINK, replace(LINK, is_up=False, state="DOWN")], NETWORK, "mlx5_0:1 of host-2 is DOWN"),
    "a link that was never up": ([replace(LINK, is_up=False, state="DOWN")] * 2, None, ""),
    "a link that is slower": (
        [LINK, replace(LINK, speed_mbps=200_000.0)], NETWORK, "runs at 200 Gbit/s, down from 400"
    ),
    "a link that came and went": ([LINK, replace(LINK, num_downs=4)], NETWORK, "lost its connection .* 2 changes"),
    "errors of a link": ([LINK, replace(LINK, rx_errors=90, symbol_errors=20)], NETWORK, "105 errors .*threshold: 100"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_device_problem_of_readings(case: str) -> None:
    readings, kind, text = CASES[case]
    found = watched(readings).problems({"host-2"})
    assert [one.kind for one in found] == ([] if kind is None else [kind])
    if kind is not None:
        assert re.search(text, found[0].text), found[0].text
        assert found[0].host == "host-2"
        assert found[0].ranks == ((0,) if "rank 0" in found[0].text else ())


def test_an_error_is_reported_for_an_hour() -> None:
    watch = watched([GPU, xid(79), replace(GPU, uncorrected_errors=5)])
    assert len(watch.problems({"host-2"})) == 2
    later = replace(GPU, uncorrected_errors=5)
    watch.tick(NOW_S + 3700)
    for _, table in device_tables(sample(NOW_S + 3700, later), PLACE):
        watch.consume(table)
    assert watch.problems({"host-2"}) == ()


@pytest.mark.parametrize(
    ("interval_s", "passed_s", "connected", "count"),
    [(10.0, 59.0, "host-2", 0), (10.0, 61.0, "host-2", 1), (60.0, 290.0, "host-2", 0), (60.0, 301.0, "host-2", 1),
     (10.0, 61.0, "host-1", 0), (10.0, 8000.0, "host-2", 0)],
)  # fmt: skip
def test_silence_is_reported_while_the_host_is_connected(
    interval_s: float, passed_s: float, connected: str, count: int
) -> None:
    watch = watched([GPU, LINK], interval_s)
    watch.tick(NOW_S + passed_s)
    found = watch.problems({connected})
    assert [one.kind for one in found] == [SILENT] * count


def test_forgotten_host_keeps_no_problem_and_takes_none_along() -> None:
    watch = watched([HOT] * 4)
    other = replace(PLACE, host="host-1")
    for moment_s, place in ((NOW_S, other), *((NOW_S + 7190 + 10 * number, PLACE) for number in range(4))):
        watch.tick(moment_s)
        for _, table in device_tables(sample(moment_s, LOST if place is other else HOT), place):
            watch.consume(table)
    found = watch.problems({"host-1", "host-2"})
    assert [(one.host, one.kind) for one in found] == [("host-2", DEGRADED)]


def test_problems_are_listed_worst_first() -> None:
    watch = watched([LINK, replace(LINK, is_up=False, state="DOWN"), HOT, HOT, HOT, HOT, xid(48)])
    found: tuple[DeviceProblem, ...] = watch.problems({"host-2"})
    kinds: list[Any] = [one.kind for one in found]
    assert kinds == sorted(kinds, key=list(DeviceProblemKind).index)
    assert kinds[0] is FAILING


SILENCE_S = 4.0
"""A driver that prints nothing for this long hangs."""


@contextmanager
def supervisor(nvml: FakeNvml, deadline_s: float = DEADLINE_S) -> Iterator[DeviceSupervisor]:
    environment = {**os.environ, **nvml.environment}
    running = DeviceSupervisor(0.05, deadline_s=deadline_s, pause_s=0.05, environment=environment)
    try:
        yield running
    finally:
        running.close()


@pytest.mark.slow
def test_a_hanging_driver_is_reported_until_it_responds(tmp_path: Path) -> None:
    nvml = fake_nvml(tmp_path)
    with supervisor(nvml, SILENCE_S) as running:
        devices = HostDevices("host-1", None, running)
        wait_until(lambda: running.newest is not None, "a first sample")
        nvml.say({1: {"hang": 1}})
        wait_until(lambda: running.problem != "", "the silence")
        assert "has printed nothing for 4 s" in running.problem
        running.take()
        # the streamer does not wait for the driver, which answers only after the hang ends below
        (kind, table) = devices.poll((), 0, now_ns=10**18)[0]
        assert kind is Gpus
        assert (table.gpu.tolist(), table.error.tolist()) == ([-1], [running.problem])
        assert devices.poll((), 0, now_ns=10**18 + 1) == [], "the error is not repeated at once"
        nvml.say({1: {"hang": 0}})
        wait_until(lambda: running.problem == "" and bool(running.take()), "samples again")
        assert devices.reading is not None
        assert devices.reading.problem == ""


def test_reloaded_gpu_driver_is_opened_again(tmp_path: Path) -> None:
    nvml = fake_nvml(tmp_path)
    with supervisor(nvml) as running:
        wait_until(lambda: running.newest is not None, "a first sample")
        nvml.say(driver=9)
        wait_until(lambda: running.problem == "Driver Not Loaded", "the driver that is gone")
        nvml.say(driver=0)
        wait_until(lambda: running.problem == "", "the driver that is back")
        assert running.newest is not None
        assert len(running.newest.driver.gpus) == 2


def test_a_reader_that_is_killed_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with supervisor(fake_nvml(tmp_path)) as running:
        wait_until(lambda: running.newest is not None, "a first sample")
        (reader,) = (pid for pid in descendants(os.getpid()) if b"megatrain_diagnostics.devices" in words_of(pid))
        os.kill(reader, signal.SIGKILL)
        # The next one may answer before the problem is read.
        wait_until(lambda: "the program that reads devices was killed by SIGKILL (9)" in caplog.text, "its end")
        wait_until(lambda: running.problem == "", "samples of the next one")


@pytest.mark.slow(kept=["78"])
@pytest.mark.parametrize(
    ("end", "num_lives", "ended"),
    [
        ("raise SystemExit(78)", 2, "ended with exit code 78 (config)"),
        ("import os; os.kill(os.getpid(), 11)", 10, "was killed by SIGSEGV (11)"),
    ],
    ids=["78", "SIGSEGV"],
)
def test_reader_that_always_ends_alike_is_given_up(tmp_path: Path, end: str, num_lives: int, ended: str) -> None:
    package = tmp_path / "megatrain_diagnostics"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "devices.py").write_text(f"open({str(tmp_path / 'lives')!r}, 'a').write('x')\n{end}\n")
    running = DeviceSupervisor(0.05, pause_s=1e-4, environment={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        wait_until(lambda: "not started again" in running.problem, "the last end")
        assert running.problem == (
            f"the program that reads devices {ended} {num_lives} times, and is not started again: fix the cause, then "
            "launch the job again"
        )
        assert (tmp_path / "lives").read_text() == "x" * num_lives
    finally:
        running.close()
