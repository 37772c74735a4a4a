"""GPUs and links of a host on the page and in the heat map, from stored rows."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from megatrain.contracts.layout import Layout
from megatrain_dashboard.api import devices
from megatrain_dashboard.api.devices import NUM_POINTS
from megatrain_dashboard.api.heat import route as heat_route
from megatrain_dashboard.api.heat.subject import DEVICE_SUBJECTS
from megatrain_dashboard.responses.binary import unpack
from megatrain_diagnostics.devices.rows import HostPlace, device_tables
from megatrain_diagnostics.devices.sample import HostSample
from megatrain_diagnostics.events.tables import Table, joined
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading, XidEvent
from megatrain_job.devices.links import LinkReading
from tests.helpers.dashboard_pictures import PictureSource, picture_client, stored_events
from tests.helpers.source_tree import ROOT
from tests.helpers.synthetic_steps import SyntheticJob

BEGAN_S = 1_800_000_000.0
EACH_S, STEPS_EACH = 60.0, 5
NUM_READINGS = 10
HOT_FROM = 6
"""The first reading in which GPU 1 of host-1 (rank 3) is throttled."""
LAYOUT = Layout(tp_size=2, pp_size=1, dp_size=2)
GPU = GpuReading(
    0, "GPU-0", temperature_c=62.0, sm_clock_mhz=1980.0, max_sm_clock_mhz=1980.0, throttle_reasons=0x4, power_w=600.0,
    uncorrected_errors=0, corrected_errors=3, is_row_remap_pending=False,
)  # fmt: skip
LINK = LinkReading("mlx5_0:1", True, "ACTIVE", 400_000.0, rx_errors=10, tx_errors=0)


def reading(host: int, number: int) -> HostSample:
    is_hot = host == 1 and number >= HOT_FROM
    hot = replace(GPU, temperature_c=91.0, sm_clock_mhz=1050.0, throttle_reasons=0x44)
    gpus = (GPU, replace(hot if is_hot else GPU, index=1, uuid="GPU-1"))
    links = (replace(LINK, rx_errors=10 + 5 * number if host == 1 else 10),)
    at_s = BEGAN_S + EACH_S * number
    xids = (XidEvent(at_s, "GPU-1", 94),) if is_hot and number == HOT_FROM else ()
    return HostSample(at_s, 0.0, DriverReading("nvml", gpus=gpus), links, xids)


def device_rows() -> list[Table]:
    found: dict[Any, list[Any]] = {}
    for host in (0, 1):
        for number in range(NUM_READINGS):
            step = STEPS_EACH * number
            ranks = {f"GPU-{gpu}": (2 * host + gpu, step) for gpu in (0, 1)}
            for kind, table in device_tables(reading(host, number), HostPlace(f"host-{host}", 1, step, ranks)):
                found.setdefault(kind, []).append(table)
    return [joined(kind, tables) for kind, tables in found.items()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> PictureSource:
    made = SyntheticJob(LAYOUT, ranks_per_host=2)
    directory = tmp_path_factory.mktemp("run")
    steps = [made.step(step)[0] for step in range(STEPS_EACH * NUM_READINGS)]
    return PictureSource(stored_events(directory, made.ranks(), *steps, *device_rows()))


@pytest.fixture(scope="module")
def page(source: PictureSource) -> TestClient:
    return picture_client(source, devices.router)


@pytest.fixture(scope="module")
def heat(source: PictureSource) -> TestClient:
    return picture_client(source, heat_route.router)


def test_devices_have_their_newest_reading_and_a_history(page: TestClient) -> None:
    found = page.get("/hosts/host-1/devices?minutes=10").json()
    first, second = found["gpus"]
    assert (first["gpu"], first["rank"], first["throttled"], first["fault"]) == (0, 2, "power cap", "")
    assert (second["rank"], second["throttled"]) == (3, "power cap, hardware thermal slowdown")
    assert (second["sm_clock_mhz"], second["max_sm_clock_mhz"]) == (1050.0, 1980.0)
    assert second["fault"] == "hardware thermal slowdown"
    assert second["memory_used_bytes"] is None
    known = [value for value in second["temperature_history"] if value is not None]
    assert known == [62.0] * HOT_FROM + [91.0] * (NUM_READINGS - HOT_FROM)
    assert len(second["temperature_history"]) == NUM_POINTS
    (link,) = found["links"]
    assert (link["rx_errors"], link["speed_mbps"], link["symbol_errors"]) == (55.0, 400_000.0, None)
    assert [value for value in link["error_history"] if value is not None] == [0.0] + [5.0] * (NUM_READINGS - 1)
    (xid,) = found["xids"]
    assert (xid["xid"], xid["kind"], xid["gpu"], xid["rank"], xid["step"]) == (94, "mended", 1, 3, 30)
    assert found["last_unix_s"] == BEGAN_S + EACH_S * (NUM_READINGS - 1)
    assert found["problem"] == ""


def test_devices_of_an_earlier_range_have_its_readings(page: TestClient) -> None:
    def asked(first: int, last: int) -> Any:
        begin, end = (datetime.fromtimestamp(BEGAN_S + EACH_S * one, UTC).isoformat() for one in (first, last))
        return page.get("/hosts/host-1/devices", params={"from": begin, "to": end}).json()

    found = asked(1, HOT_FROM - 1)
    assert (found["first_unix_s"], found["last_unix_s"]) == (BEGAN_S + EACH_S, BEGAN_S + EACH_S * (HOT_FROM - 1))
    second = found["gpus"][1]
    assert (second["temperature_c"], second["throttled"]) == (62.0, "power cap")
    known = [value for value in second["temperature_history"] if value is not None]
    assert known == [62.0] * (HOT_FROM - 1)
    assert asked(-200, -100)["gpus"] == []
    # Reading a line of a year would take minutes.
    long = asked(-100_000, HOT_FROM)
    assert long["last_unix_s"] - long["first_unix_s"] == 86_400.0


def test_history_has_only_the_readings_of_its_time_and_host(page: TestClient) -> None:
    found = page.get("/hosts/host-1/devices?minutes=1").json()
    assert sum(value is not None for value in found["gpus"][0]["power_history"]) == 2
    unknown = page.get("/hosts/host-9/devices").json()
    assert (unknown["last_unix_s"], unknown["gpus"], unknown["links"], unknown["xids"]) == (None, [], [], [])


def cells(heat: TestClient, query: str) -> tuple[dict[str, Any], np.ndarray]:
    response = heat.get(f"/heat?{query}")
    assert response.status_code == 200, response.text
    fields, arrays = unpack(response.content)
    known = fields["low"] + arrays["cells"] * (fields["high"] - fields["low"]) / (fields["num_levels"] - 1)
    return fields, np.where(arrays["cells"] == fields["no_value"], np.nan, known)


def test_a_reading_holds_until_the_next_one(heat: TestClient) -> None:
    fields, found = cells(heat, "operation=gpu-clock-lost&scale=absolute&low=0&high=930")
    assert (fields["unit"], fields["first_step"], found.shape) == ("MHz", 0, (4, STEPS_EACH * NUM_READINGS))
    expected = np.zeros_like(found)
    expected[3, STEPS_EACH * HOT_FROM :] = 930.0
    np.testing.assert_allclose(found, expected, atol=4)
    _, part = cells(heat, "operation=gpu-clock-lost&scale=absolute&low=0&high=930&first=32&last=38")
    np.testing.assert_allclose(part, expected[:, 32:39], atol=4)


def test_links_are_those_of_all_ranks_of_their_host(heat: TestClient) -> None:
    _, found = cells(heat, "operation=link-errors&scale=absolute&low=0&high=254")
    np.testing.assert_allclose(found[:, -1], [10, 10, 55, 55], atol=1)


def test_each_subject_is_answered_and_offered(heat: TestClient) -> None:
    for name in DEVICE_SUBJECTS:
        fields, _ = cells(heat, f"operation={name}")
        assert fields["operation"] == name
    text = (ROOT / "diagnostics/web/src/views/heat/query.ts").read_text()
    offered = re.search(r"DEVICE_METRICS = \[(.*?)\];", text, re.DOTALL)
    assert offered is not None
    assert re.findall(r'value: "([a-z-]+)"', offered[1]) == list(DEVICE_SUBJECTS)


def test_the_exact_cell_has_its_unit(heat: TestClient) -> None:
    found = heat.get("/heat/cell?operation=gpu-temperature&rank=3&step=44").json()
    assert (found["value"], found["unit"], found["measure"]) == (91.0, "C", "newest")
    refused = heat.get("/heat?operation=gpu-color")
    assert refused.status_code == 400
    assert "gpu-temperature" in refused.text
