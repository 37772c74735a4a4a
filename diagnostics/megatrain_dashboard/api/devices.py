"""GET /hosts/{host}/devices: the newest reading of each GPU and link of a host, its history and its errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.formatting import age_text
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.sources.window import Window
from megatrain_diagnostics.analysis.device_states import LIMITS
from megatrain_diagnostics.events.tables import Float64, Gpus, Int64, NetworkLinks, Xids, num_rows, select
from megatrain_diagnostics.store.device_queries import HostDeviceRows, last_reading_ns, rows_of_host
from megatrain_job.devices.gpu_readings import FAULTY_REASONS, throttle_text
from megatrain_job.failures.xids import xid_of

NUM_POINTS = 60
"""Number of points of a history."""
_MAX_XIDS = 100
_IDLE = 0x1
_FRESH_S = 5.0
_NS = 10**9
_MINUTE_NS = 60 * _NS
_MAX_MINUTES = 24 * 60


class GpuDocument(Document):
    """A GPU at its last reading. Null: not reported by the driver. Histories: oldest first, null without a reading."""

    gpu: int
    uuid: str
    rank: int | None
    at_unix_s: float
    error: str
    """The reason why the GPU cannot be read; empty: it was read."""
    recovery: str
    throttled: str
    """The reasons why its clocks are throttled; empty: they are not."""
    fault: str
    """Those reasons for throttling that a healthy GPU does not have: heat, and the power supply."""
    temperature_c: float | None
    slowdown_temperature_c: float | None
    memory_temperature_c: float | None
    sm_clock_mhz: float | None
    max_sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    power_limit_w: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    utilization: float | None
    corrected_errors: float | None
    uncorrected_errors: float | None
    lifetime_corrected_errors: float | None
    lifetime_uncorrected_errors: float | None
    retired_pages: float | None
    corrected_rows: float | None
    uncorrected_rows: float | None
    is_reset_pending: bool
    has_remap_failed: bool
    nvlink_errors: float | None
    pcie_replays: float | None
    temperature_history: tuple[float | None, ...]
    clock_history: tuple[float | None, ...]
    power_history: tuple[float | None, ...]


class LinkDocument(Document):
    """A network interface or RDMA port at its newest reading; counters since its driver was loaded."""

    link: str
    at_unix_s: float
    is_up: bool
    state: str
    speed_mbps: float | None
    downs: float | None
    rx_errors: float | None
    tx_errors: float | None
    rx_dropped: float | None
    tx_dropped: float | None
    symbol_errors: float | None
    retransmissions: float | None
    error_history: tuple[float | None, ...]
    """The sum of receive, transmit and symbol errors in each stretch of time."""


class XidDocument(Document):
    """An error that NVIDIA's driver reported."""

    at_unix_s: float
    gpu: int | None
    rank: int | None
    step: int | None
    xid: int
    meaning: str
    kind: str
    """The origin of the error: hardware, mended, program, clean-up or healthy again."""
    advice: str


class HostDevicesDocument(Document):
    """The response of /hosts/{host}/devices; empty where nothing was ever read."""

    host: str
    first_unix_s: float | None
    last_unix_s: float | None
    """Histories reach from `first_unix_s` to `last_unix_s`."""
    problem: str
    """Why there are no newer readings, else the driver's newest error about all GPUs; empty if neither applies."""
    gpus: tuple[GpuDocument, ...]
    links: tuple[LinkDocument, ...]
    xids: tuple[XidDocument, ...]
    """The newest first."""


def nothing_read(host: str) -> HostDevicesDocument:
    """Return the document for a host whose devices were never read."""
    return HostDevicesDocument(host=host, first_unix_s=None, last_unix_s=None, problem="", gpus=(), links=(), xids=())


def host_devices_document(
    host: str, rows: HostDeviceRows, first_ns: int, last_ns: int, problem: str = ""
) -> HostDevicesDocument:
    """Return the document of rows between two moments.

    `problem`: why there are no newer rows; if it is empty, an error that the GPU driver reported takes its place.
    """
    gpus, links = rows.gpus, rows.links
    return HostDevicesDocument(
        host=host,
        first_unix_s=first_ns / 1e9,
        last_unix_s=last_ns / 1e9,
        problem=problem or _driver_problem(gpus),
        gpus=tuple(_gpu(gpu, first_ns, last_ns) for gpu in _gpus_of(gpus)),
        links=tuple(
            _link(_by_time(links, links.link == name), first_ns, last_ns) for name in sorted(set(links.link.tolist()))
        ),
        xids=tuple(_xids(rows.xids)),
    )


def _driver_problem(gpus: Gpus) -> str:
    """Return the newest error that concerns all GPUs; empty if there is none, or readings of GPUs are newer."""
    about_all = _by_time(gpus, gpus.gpu < 0)
    newest = gpus.at_ns[gpus.gpu >= 0].max(initial=0)
    if not num_rows(about_all) or about_all.at_ns[-1] < newest:
        return ""
    return str(about_all.error[-1])


def _gpus_of(gpus: Gpus) -> Iterator[Gpus]:
    """Yield the rows of each GPU. They are grouped by number, because a lost GPU cannot report its UUID."""
    for number in sorted(set(gpus.gpu[gpus.gpu >= 0].tolist())):
        yield _by_time(gpus, gpus.gpu == number)


def _by_time(table: Any, mask: Any) -> Any:
    rows = select(table, mask)
    return select(rows, np.argsort(rows.at_ns, kind="stable"))


def _gpu(rows: Gpus, first_ns: int, last_ns: int) -> GpuDocument:
    bits = 0 if math.isnan(rows.throttle_reasons[-1]) else int(rows.throttle_reasons[-1]) & ~_IDLE
    rank = int(rows.rank[-1])
    known = [uuid for uuid in rows.uuid.tolist() if uuid]
    return GpuDocument(
        gpu=int(rows.gpu[-1]),
        uuid=known[-1] if known else "",
        rank=rank if rank >= 0 else None,
        at_unix_s=int(rows.at_ns[-1]) / 1e9,
        error=str(rows.error[-1]),
        recovery=str(rows.recovery[-1]),
        throttled=throttle_text(bits),
        fault=throttle_text(bits & FAULTY_REASONS),
        is_reset_pending=bool(rows.is_reset_pending[-1] == 1.0),
        has_remap_failed=bool(rows.has_remap_failed[-1] == 1.0),
        temperature_history=_history(rows.at_ns, rows.temperature_c, first_ns, last_ns),
        clock_history=_history(rows.at_ns, rows.sm_clock_mhz, first_ns, last_ns),
        power_history=_history(rows.at_ns, rows.power_w, first_ns, last_ns),
        **_newest_numbers(GpuDocument, rows),
    )


def _link(rows: NetworkLinks, first_ns: int, last_ns: int) -> LinkDocument:
    errors = np.nansum([rows.rx_errors, rows.tx_errors, rows.symbol_errors], axis=0)
    # a counter that was reset counts from zero
    grown = np.diff(errors, prepend=errors[:1])
    grown = np.where(grown < 0.0, errors, grown)
    return LinkDocument(
        link=str(rows.link[-1]),
        at_unix_s=int(rows.at_ns[-1]) / 1e9,
        is_up=bool(rows.is_up[-1] == 1.0),
        state=str(rows.state[-1]),
        error_history=_history(rows.at_ns, grown, first_ns, last_ns, is_summed=True),
        **_newest_numbers(LinkDocument, rows),
    )


def _newest_numbers(document: type[Document], rows: Any) -> dict[str, float | None]:
    """Return the newest value of each column that is an optional number of the document."""
    names = (name for name, field in document.model_fields.items() if field.annotation == float | None)
    return {name: _number(getattr(rows, name)[-1]) for name in names}


def _xids(table: Xids) -> Iterator[XidDocument]:
    for row in np.argsort(-table.at_ns, kind="stable")[:_MAX_XIDS].tolist():
        xid = xid_of(int(table.xid[row]))
        yield XidDocument(
            at_unix_s=int(table.at_ns[row]) / 1e9,
            gpu=_whole(table.gpu[row]),
            rank=_whole(table.rank[row]),
            step=_whole(table.step[row]),
            xid=xid.number,
            meaning=xid.meaning,
            kind=str(xid.kind),
            advice=xid.advice,
        )


def _history(
    at_ns: Int64, values: Float64, first_ns: int, last_ns: int, *, is_summed: bool = False
) -> tuple[float | None, ...]:
    """Return the greatest value, or the sum, of each stretch of time; None where there is no reading."""
    place = np.clip((at_ns - first_ns) * NUM_POINTS // max(1, last_ns - first_ns), 0, NUM_POINTS - 1)
    found = np.full(NUM_POINTS, np.nan)
    for number in np.unique(place).tolist():
        known = values[(place == number) & ~np.isnan(values)]
        if len(known):
            found[number] = known.sum() if is_summed else known.max()
    return tuple(_number(value) for value in found)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _whole(value: int) -> int | None:
    return int(value) if value >= 0 else None


def router(parts: DashboardParts) -> APIRouter:
    """Return the route of a host's GPUs and network links: their newest readings and their history."""
    routes = APIRouter(tags=["hosts"], dependencies=[parts.heavy_query])
    source = parts.source

    def problem(last_ns: int, now_s: float) -> str:
        """Return a text with the time since the last reading of a host of a running job; empty if it is short."""
        config = source.facts().config
        interval_s = (DiagnosticsConfig() if config is None else config.diagnostics).telemetry_interval_s
        if source.is_recorded or now_s - last_ns / _NS <= LIMITS.silent_after_s(interval_s):
            return ""
        return f"no reading for {age_text(last_ns / _NS, now_s)}"

    def made(host: str, minutes: int, window: Window) -> HostDevicesDocument:
        last_ns = last_reading_ns(source.events, host)
        if last_ns is None:
            return nothing_read(host)
        now_s = parts.clock()
        end_ns = last_ns if source.is_recorded else max(last_ns, int(now_s * _NS))
        if window.end_s is not None:
            end_ns = min(end_ns, int(window.end_s * _NS))
        first_ns = end_ns - minutes * _MINUTE_NS
        if window.begin_s is not None:
            first_ns = min(end_ns, max(int(window.begin_s * _NS), end_ns - _MAX_MINUTES * _MINUTE_NS))
        # without a window, the last reading of a host is shown even if the host has been silent for long
        rows = rows_of_host(source.events, host, min(first_ns, last_ns) if window.is_whole else first_ns, end_ns)
        return host_devices_document(host, rows, first_ns, end_ns, problem(last_ns, now_s))

    @routes.get("/hosts/{host}/devices", response_model=HostDevicesDocument)
    def devices(
        request: Request,
        host: Annotated[str, Path(max_length=256)],
        minutes: Annotated[int, Query(ge=1, le=_MAX_MINUTES)] = 60,
        begin: From = "",
        end: To = "",
    ) -> Response:
        """Return the newest readings of a host's GPUs and network links, and their history of the last minutes.

        With `to`: the readings at that end of a part of the run. With `from`: the history begins there, but at most a
        day before its end.
        """
        window = parts.window(begin, end)
        key = ("devices", host, minutes, window)
        return parts.responses.answer(request, key, lambda: made(host, minutes, window), fresh_s=_FRESH_S)

    return routes
