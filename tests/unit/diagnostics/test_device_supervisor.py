"""A driver that never answers blocks only the process that queries it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain_diagnostics.devices.supervisor import DeviceSupervisor
from megatrain_diagnostics.events.tables import Gpus
from megatrain_diagnostics.streamer.host_devices import HostDevices
from tests.helpers.fake_nvml import FakeNvml, fake_nvml
from tests.helpers.processes import descendants, words_of
from tests.helpers.waiting import wait_until

SILENCE_S = 1.5
"""A driver that prints nothing for this long hangs."""


@contextmanager
def supervisor(nvml: FakeNvml) -> Iterator[DeviceSupervisor]:
    running = DeviceSupervisor(0.05, deadline_s=SILENCE_S, pause_s=0.05, environment={**os.environ, **nvml.environment})
    try:
        yield running
    finally:
        running.close()


@pytest.mark.slow
def test_a_hanging_driver_is_reported_until_it_responds(tmp_path: Path) -> None:
    nvml = fake_nvml(tmp_path)
    with supervisor(nvml) as running:
        devices = HostDevices("host-1", None, running)
        wait_until(lambda: running.newest is not None, "a first sample")
        nvml.say({1: {"hang": 1}})
        wait_until(lambda: running.problem != "", "the silence")
        assert "has printed nothing for 2 s" in running.problem
        running.take()
        # the streamer does not wait for the driver, which answers only after the hang ends below
        (kind, table) = devices.poll((), 0, 10**18)[0]
        assert kind is Gpus
        assert (table.gpu.tolist(), table.error.tolist()) == ([-1], [running.problem])
        assert devices.poll((), 0, 10**18 + 1) == [], "the error is not repeated at once"
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


def test_a_reader_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with supervisor(fake_nvml(tmp_path)) as running:
        wait_until(lambda: running.newest is not None, "a first sample")
        (reader,) = (pid for pid in descendants(os.getpid()) if b"megatrain_diagnostics.devices" in words_of(pid))
        os.kill(reader, signal.SIGKILL)
        wait_until(lambda: running.problem == "the program that reads devices was killed by SIGKILL (9)", "its end")
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
