"""GET /hosts and /hosts/{host}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from megatrain.contracts.errors import DataError
from megatrain_dashboard.api.hosts.document import HostHistoryDocument, HostsDocument
from megatrain_dashboard.api.hosts.view import HostInputs, host_history_document, hosts_document
from megatrain_dashboard.parts import DashboardParts
from megatrain_dashboard.responses.cache import cached_response, document_bytes, document_response
from megatrain_dashboard.responses.errors import not_found, shown
from megatrain_dashboard.sources.host_names import host_names
from megatrain_dashboard.sources.protocol import JobSource
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.host_queries import last_rounds, newest_clocks, rounds_of_host

_FRESH_S = 1.0
_MAX_NAMED = 8


def router(parts: DashboardParts) -> APIRouter:
    """Return the routes that answer with the state of all hosts, and with the state and history of one host."""
    routes = APIRouter(tags=["hosts"])
    source = parts.source

    def all_hosts() -> HostsDocument:
        return hosts_document(_inputs(source, parts.clock()))

    @routes.get("/hosts", response_model=HostsDocument)
    def hosts(request: Request) -> Response:
        """Return all hosts: those of the round first, by rank."""
        version = source.live().versions["hosts"]
        key = ("hosts", version) if source.is_recorded else ("hosts",)
        response = parts.responses.get(key, lambda: document_bytes(all_hosts()), fresh_s=_FRESH_S)
        return cached_response(request, response)

    @routes.get("/hosts/{host}", response_model=HostHistoryDocument)
    def host(host: Annotated[str, Path(max_length=256)]) -> Response:
        """Return the state of one host, its checks, and the incidents that blame it or in which it was a victim."""
        found = {one.host: one for one in all_hosts().hosts}
        if host not in found:
            names = ", ".join(list(found)[:_MAX_NAMED]) or "none"
            raise not_found(f"host {shown(host)}: no such host; there are {names}, {len(found):,} in all")
        facts = source.facts()
        return document_response(
            host_history_document(
                found[host], facts.checks.get(host), facts.incidents, _rounds(source, host),
                host_names(source, facts.incidents),
            )
        )  # fmt: skip

    return routes


def _inputs(source: JobSource, now_s: float) -> HostInputs:
    try:
        clocks = newest_clocks(source.events, None if source.is_recorded else int(now_s * 1e9))
    except DataError:
        clocks = {}
    roster, rounds = _kept(source)
    return HostInputs(source.snapshot(), roster, source.daemon_state(), clocks, rounds)


def _kept(source: JobSource) -> tuple[Roster | None, Mapping[str, int]]:
    """Return the roster and the last round of each host from events, where etcd has no state of the job."""
    if source.snapshot() is not None:
        return None, {}
    try:
        return source.roster(None), last_rounds(source.events)
    except DataError:
        return None, {}


def _rounds(source: JobSource, host: str) -> set[int]:
    """Return the rounds that a host took part in, from events and etcd."""
    snapshot = source.snapshot()
    rounds = () if snapshot is None else snapshot.rounds.values()
    found = {one.number for one in rounds if any(part.host == host for part in one.hosts)}
    try:
        return found | set(rounds_of_host(source.events, host))
    except DataError:
        return found
