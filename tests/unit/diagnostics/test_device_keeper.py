"""A driver that never answers holds up nothing but the program that asks it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain_diagnostics.devices.keeper import DeviceKeeper
from megatrain_diagnostics.events.tables import Gpus
from megatrain_diagnostics.streamer.host_devices import HostDevices
from tests.helpers.fake_nvml import FakeNvml, fake_nvml
from tests.helpers.waiting import wait_until

DEADLINE_S = 1.5


@contextmanager
def keeper(nvml: FakeNvml) -> Iterator[DeviceKeeper]:
    kept = DeviceKeeper(0.05, deadline_s=DEADLINE_S, pause_s=0.05, environment={**os.environ, **nvml.environment})
    try:
        yield kept
    finally:
        kept.close()


def test_a_driver_that_hangs_is_told_of_and_heard_again(tmp_path: Path) -> None:
    nvml = fake_nvml(tmp_path)
    with keeper(nvml) as kept:
        devices = HostDevices("host-1", None, kept)
        wait_until(lambda: kept.newest is not None, "a first sample", 20)
        nvml.say({1: {"hang": 1}})
        wait_until(lambda: kept.trouble != "", "the silence", 20)
        assert "the driver has not answered for 2 s" in kept.trouble
        kept.take()
        began = time.monotonic()
        (kind, table) = devices.look((), 0, 10**18)[0]
        assert time.monotonic() - began < 1.0, "whoever streams does not wait for the driver"
        assert kind is Gpus
        assert (table.gpu.tolist(), table.error.tolist()) == ([-1], [kept.trouble])
        assert devices.look((), 0, 10**18 + 1) == [], "it is not said again at once"
        nvml.say({1: {"hang": 0}})
        wait_until(lambda: kept.trouble == "" and bool(kept.take()), "samples again", 20)
        assert devices.reading is not None
        assert devices.reading.trouble == ""


def test_a_driver_that_is_loaded_anew_is_opened_anew(tmp_path: Path) -> None:
    nvml = fake_nvml(tmp_path)
    with keeper(nvml) as kept:
        wait_until(lambda: kept.newest is not None, "a first sample", 20)
        nvml.say(driver=9)
        wait_until(lambda: kept.trouble == "Driver Not Loaded", "the driver that is gone", 20)
        nvml.say(driver=0)
        wait_until(lambda: kept.trouble == "", "the driver that is back", 20)
        assert kept.newest is not None
        assert len(kept.newest.driver.gpus) == 2
