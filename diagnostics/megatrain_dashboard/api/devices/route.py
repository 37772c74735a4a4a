"""GET /hosts/{host}/devices."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.formatting.quantities import age_text
from megatrain_dashboard.api.devices.document import HostDevicesDocument
from megatrain_dashboard.api.devices.view import host_devices_document, nothing_read
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import cached_response, document_bytes
from megatrain_dashboard.responses.query_parameters import From, To
from megatrain_dashboard.sources.window import Window
from megatrain_diagnostics.analysis.device_limits import LIMITS
from megatrain_diagnostics.store.device_queries import last_reading_ns, rows_of_host

_FRESH_S = 5.0
_NS = 10**9
_MINUTE_NS = 60 * _NS
_MAX_MINUTES = 24 * 60


def router(parts: DashboardParts) -> APIRouter:
    """Return the route of a host's device readings: its GPUs and network links, the newest ones and their history."""
    routes = APIRouter(tags=["hosts"], dependencies=[parts.heavy_query])
    source = parts.source

    def problem(last_ns: int, now_s: float) -> str:
        """Return a text that says for how long nothing was read of a host of a running job; empty: not for long."""
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
        # without a window, a host that has been silent for long shows its last reading
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

        With `from` and `to`: the readings at the end of that part of the run, and the history of its last day.
        """
        window = parts.window(begin, end)
        key = ("devices", host, minutes, window)
        response = parts.responses.get(key, lambda: document_bytes(made(host, minutes, window)), fresh_s=_FRESH_S)
        return cached_response(request, response)

    return routes
