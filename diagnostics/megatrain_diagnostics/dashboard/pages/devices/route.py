"""GET /hosts/{host}/devices."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.contracts.texts import age_text
from megatrain_diagnostics.analysis.device_limits import LIMITS
from megatrain_diagnostics.dashboard.answers.answer import cached_answer, document_bytes
from megatrain_diagnostics.dashboard.answers.questions import From, To
from megatrain_diagnostics.dashboard.pages.devices.document import HostDevicesDocument
from megatrain_diagnostics.dashboard.pages.devices.view import host_devices_document, nothing_read
from megatrain_diagnostics.dashboard.parts import Parts
from megatrain_diagnostics.dashboard.sources.window import Window
from megatrain_diagnostics.store.device_questions import last_reading_ns, rows_of_host

_FRESH_S = 5.0
_NS = 10**9
_MINUTE_NS = 60 * _NS
_MOST_MINUTES = 24 * 60


def router(parts: Parts) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(tags=["hosts"], dependencies=[parts.heavy_question])
    source = parts.source

    def trouble(last_ns: int, now_s: float) -> str:
        """Say since when nothing was read of a host whose job runs."""
        config = source.facts().config
        interval_s = (DiagnosticsConfig() if config is None else config.diagnostics).telemetry_interval_s
        if source.is_recorded or now_s - last_ns / _NS <= LIMITS.silent_after_s(interval_s):
            return ""
        return f"nothing was read for {age_text(last_ns / _NS, now_s)}"

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
            first_ns = min(end_ns, max(int(window.begin_s * _NS), end_ns - _MOST_MINUTES * _MINUTE_NS))
        # a host that is silent for long shows its last reading, unless another part of the run is asked for
        rows = rows_of_host(source.events, host, min(first_ns, last_ns) if window.is_whole else first_ns, end_ns)
        return host_devices_document(host, rows, first_ns, end_ns, trouble(last_ns, now_s))

    @routes.get("/hosts/{host}/devices", response_model=HostDevicesDocument)
    def devices(
        request: Request,
        host: Annotated[str, Path(max_length=256)],
        minutes: Annotated[int, Query(ge=1, le=_MOST_MINUTES)] = 60,
        begin: From = "",
        end: To = "",
    ) -> Response:
        """Return what the GPUs and network links of a host say, and how they were in the last minutes.

        With `from` and `to`: what they said at the end of that part of the run, and how they were in its last day.
        """
        window = parts.window(begin, end)
        key = ("devices", host, minutes, window)
        answer = parts.answers.get(key, lambda: document_bytes(made(host, minutes, window)), fresh_s=_FRESH_S)
        return cached_answer(request, answer)

    return routes
