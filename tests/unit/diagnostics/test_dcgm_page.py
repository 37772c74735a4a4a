"""GPUs from pages of NVIDIA's DCGM exporter. The pages follow DCGM's documentation; none is recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_diagnostics.devices.dcgm import DcgmExporter, read_samples, reading_of
from megatrain_job.devices.gpu_readings import DriverReading, GpuReading

LABELS = 'gpu="{0}",UUID="GPU-{0}",pci_bus_id="00000000:1B:00.0",device="nvidia{0}",modelName="NVIDIA H100 80GB HBM3"'
FIELDS = {
    "GPU_TEMP": 62, "MEMORY_TEMP": 71, "SLOWDOWN_TEMP": 89, "SM_CLOCK": 1980, "MAX_SM_CLOCK": 1980, "MEM_CLOCK": 2619,
    "CLOCKS_EVENT_REASONS": 68, "POWER_USAGE": 612.5, "POWER_MGMT_LIMIT": 700, "FB_USED": 57220, "FB_FREE": 23780,
    "FB_RESERVED": 559, "GPU_UTIL": 98, "ECC_SBE_VOL_TOTAL": 1, "ECC_DBE_VOL_TOTAL": 2, "ECC_SBE_AGG_TOTAL": 3,
    "ECC_DBE_AGG_TOTAL": 4, "RETIRED_SBE": 5, "RETIRED_DBE": 6, "CORRECTABLE_REMAPPED_ROWS": 7,
    "UNCORRECTABLE_REMAPPED_ROWS": 8, "ROW_REMAP_FAILURE": 0, "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 9,
    "NVLINK_REPLAY_ERROR_COUNT_TOTAL": 10, "PCIE_REPLAY_COUNTER": 11, "XID_ERRORS": 79,
}  # fmt: skip
COUNTERS = {name for name in FIELDS if name.endswith("_TOTAL") or name == "PCIE_REPLAY_COUNTER"}


def page(*gpus: int, **changes: float) -> str:
    lines = []
    for name, value in {**FIELDS, **changes}.items():
        kind = "counter" if name in COUNTERS else "gauge"
        lines += [f"# HELP DCGM_FI_DEV_{name} Of the GPU.", f"# TYPE DCGM_FI_DEV_{name} {kind}"]
        lines += [f"DCGM_FI_DEV_{name}{{{LABELS.format(gpu)}}} {value}" for gpu in gpus]
    return "\n".join([*lines, 'DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-0",GPU_I_ID="3"} 12', "go_goroutines 9", ""])


def reading(text: str) -> DriverReading:
    return reading_of(read_samples(text)[0])


def test_fields_are_converted_to_base_units() -> None:
    found = reading(page(0, 1))
    assert (found.source, found.error, [gpu.index for gpu in found.gpus]) == ("dcgm", "", [0, 1])
    assert found.gpus[0] == GpuReading(
        0, "GPU-0", "NVIDIA H100 80GB HBM3",
        uncorrected_errors=2, has_row_remap_failed=False, pci_bus_id="00000000:1B:00.0", temperature_c=62.0,
        slowdown_temperature_c=89.0, memory_temperature_c=71.0, sm_clock_mhz=1980.0, max_sm_clock_mhz=1980.0,
        memory_clock_mhz=2619.0, throttle_reasons=0x44, power_w=612.5, power_limit_w=700.0,
        memory_used_bytes=57220 << 20, memory_total_bytes=(57220 + 23780 + 559) << 20, utilization=0.98,
        corrected_errors=1, lifetime_corrected_errors=3, lifetime_uncorrected_errors=4, retired_pages=11,
        corrected_rows=7, uncorrected_rows=8, nvlink_errors=19, pcie_replays=11, last_xid=79,
    )  # fmt: skip


@pytest.mark.parametrize("text", ["", "go_goroutines 9\n"])
def test_another_page_is_no_reading(text: str) -> None:
    with pytest.raises(ValueError, match="the page has no GPU fields; is this the URL of NVIDIA's DCGM exporter"):
        reading(text)


UNREADABLE = (
    'DCGM_FI_DEV_GPU_TEMP{gpu="1"}',
    'DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-1"} N/A',
    'DCGM_FI_DEV_GPU_TEMP{gpu="1" 62',
    'DCGM_FI_DEV_GPU_TEMP{gpu="1",err_msg="No \\"} 3',
    "DCGM_FI_DEV_GPU_TEMP{",
    'DCGM_FI_DEV_XID_ERRORS{gpu="1",err_code="63",err_msg="a\x00b"} 63 not-a-time',
    'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-1"} 62',
    'DCGM_FI_DEV_GPU_TEMP{gpu="nvidia1",UUID="GPU-1"} 62',
    'DCGM_FI_DEV_GPU_TEMP{gpu="-1"} 62',
    'DCGM_FI_DEV_GPU_TEMP{gpu="1"} NaN',
    'DCGM_FI_DEV_GPU_TEMP{gpu="1"} +Inf',
    "DCGM_FI_DEV_GPU_TEMP 62",
)


def test_a_line_that_cannot_be_read_costs_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    good = page(0, 1)
    expected = reading(good).gpus
    for line in UNREADABLE:
        for text, count in ((f"{line}\n{good}", 1), (f"{good}{line}\n{line}\n", 2)):
            caplog.clear()
            exporter = DcgmExporter("http://localhost:9400/metrics", lambda url, text=text: text)
            found = exporter.read()
            assert (found.error, found.gpus) == ("", expected), line
            exporter.read()
            (message,) = caplog.messages
            assert f"{count} lines of the page cannot be read and are skipped, the first: {line!r}" in message


def test_unusable_line_is_shown_once_whatever_its_value(caplog: pytest.LogCaptureFixture) -> None:
    for line in ('DCGM_FI_DEV_FB_USED{UUID="GPU-9"}', "DCGM_FI_DEV_FB_USED"):
        caplog.clear()
        pages = iter([f"{line} {value}\n{page(0)}" for value in (1, 2, 3)])
        exporter = DcgmExporter("http://localhost:9400/metrics", lambda url, pages=pages: next(pages))
        for _ in range(3):
            exporter.read()
        assert len(caplog.messages) == 1, line


def test_lines_of_switches_and_cpus_are_no_problem(caplog: pytest.LogCaptureFixture) -> None:
    lines = (
        'DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT{nvswitch="nvswitch0",Hostname="h"} 40',
        'DCGM_FI_DEV_NVSWITCH_LINK_STATUS{nvlink="3",nvswitch="nvswitch0",Hostname="h"} 2',
        'DCGM_FI_DEV_CPU_UTIL_TOTAL{cpu="0",Hostname="h"} NaN',
        'DCGM_FI_DEV_CPU_UTIL_TOTAL{cpucore="1",cpu="0",Hostname="h"} 0.1',
    )
    text = "\n".join([*lines, page(0)])
    found = DcgmExporter("http://localhost:9400/metrics", lambda url: text).read()
    assert found == reading(page(0))
    assert caplog.messages == []


def test_gpu_is_put_together_from_its_mig_instances() -> None:
    text = "\n".join(
        f'DCGM_FI_DEV_{field}{{gpu="{gpu}",UUID="GPU-{gpu}",GPU_I_PROFILE="3g.40gb",GPU_I_ID="{instance}"}} {value}'
        for gpu in (0, 1)
        for instance in (1, 2)
        for field, value in (("FB_USED", 100 * instance), ("FB_FREE", 1000), ("GPU_TEMP", 60), ("XID_ERRORS", 0))
    )
    found = reading(text)
    assert [(gpu.index, gpu.uuid, gpu.temperature_c) for gpu in found.gpus] == [(0, "GPU-0", 60.0), (1, "GPU-1", 60.0)]
    assert {(gpu.memory_used_bytes, gpu.memory_total_bytes) for gpu in found.gpus} == {(300 << 20, 2300 << 20)}


def test_proxy_is_not_used_for_the_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    with served(200, page(0)) as url:
        for name in (url, url.replace("127.0.0.1", "localhost")):
            assert [gpu.uuid for gpu in DcgmExporter(name).read().gpus] == ["GPU-0"]


@pytest.mark.slow
@settings(max_examples=300, derandomize=True)
@given(st.lists(st.text(st.sampled_from('DCGM_FI_DEV{}=",0 \\NaInf.-+e\n'), max_size=40), max_size=5))
def test_lines_beside_any_garbage_are_read(texts: list[str]) -> None:
    lines = [f"DCGM_FI_DEV_{text}" for text in texts] + [f'DCGM_FI_DEV_FB_USED{{gpu="0",x="{text}' for text in texts]
    assert 1 in [gpu.index for gpu in reading("\n".join([*lines, page(1)])).gpus]


def test_only_a_changed_xid_is_an_event() -> None:
    pages = iter([page(0), page(0), page(0, XID_ERRORS=94), page(0, XID_ERRORS=0), page(0, XID_ERRORS=94)])
    exporter = DcgmExporter("http://localhost:9400/metrics", lambda url: next(pages))
    reported = []
    for _ in range(5):
        exporter.read()
        reported.append([event.number for event in exporter.wait_for_xids(0.0)])
    assert reported == [[], [], [94], [], [94]]


@contextmanager
def served(status: int, body: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_page_is_fetched_and_errors_are_reported() -> None:
    with served(200, page(0)) as url:
        assert [gpu.uuid for gpu in DcgmExporter(url).read().gpus] == ["GPU-0"]
    gone: DriverReading = DcgmExporter(url).read()
    assert gone.gpus == ()
    assert gone.error.startswith(f"diagnostics.dcgm_url={url}: ")
    with served(503, "") as url:
        assert "503" in DcgmExporter(url).read().error
