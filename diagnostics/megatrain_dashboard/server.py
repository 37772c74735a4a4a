"""The server: a socket, and uvicorn on it in another thread. A shutdown takes at most two seconds, even with open
streams; at most four, if a request is being computed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

import anyio.to_thread
import uvicorn
from starlette.types import ASGIApp

from megatrain.config.dashboard import DashboardConfig
from megatrain.config.options import options_of
from megatrain.contracts.errors import ConfigError
from megatrain_dashboard.connection import connection_class
from megatrain_dashboard.settings import DashboardSettings

_NUM_THREADS = 16
"""Threads for routes that compute; more would only share the same cores."""
_NUM_PORTS_TRIED = 20
_KEEP_ALIVE_S = 5
_GRACE_S = 1
_JOIN_S = 4.0
_BACKLOG = 256
_SERVER_START_S = 10.0


def listening_socket(settings: DashboardSettings) -> socket.socket:
    """Return a socket that listens at the address and port of the settings.

    When the default port is taken, the first free one of the next 19 is used; a requested port is never replaced.
    Raises: ConfigError naming address, port and reason.
    """
    usual = options_of(DashboardConfig)["port"].default
    has_choice = settings.port == usual and not settings.is_port_asked
    ports = range(settings.port, settings.port + _NUM_PORTS_TRIED) if has_choice else (settings.port,)
    problem = OSError("no port was tried")
    for port in ports:
        try:
            return _bound(settings.address, port)
        except OSError as error:
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
    tried = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else str(ports[0])
    found = f"dashboard.address={settings.address!r}, port={tried}: cannot listen there: {problem.strerror or problem}"
    raise ConfigError([f"{found}; name an address of this machine and a port that is free, or 0 for any"]) from problem


def _bound(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, place = socket.getaddrinfo(
        address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # the protocol is given instead of 0: asyncio sets TCP_NODELAY, and so sends small responses at once, only for
    # sockets that name TCP
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def url_of(settings: DashboardSettings, listening: socket.socket) -> str:
    """Return the address of the page for a browser; with the machine's name where it listens at all addresses."""
    port = listening.getsockname()[1]
    name = socket.gethostname() if settings.is_wildcard else settings.address
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}{settings.base_path}/"


class OpenStreams(Protocol):
    """Streams that stay open until the client or the server ends them."""

    def close(self) -> None:
        """End all streams. Called in the server's event loop."""


class DashboardServer:
    """Serves `app` at a socket until it is closed."""

    def __init__(
        self, app: ASGIApp, listening: socket.socket, settings: DashboardSettings, streams: OpenStreams
    ) -> None:
        limits = settings.limits
        self.port: int = listening.getsockname()[1]
        self._listening, self._streams = listening, streams
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=connection_class(limits),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                # any client can send X-Forwarded-For, and could thereby choose its own address
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=limits.max_head_bytes,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
                backlog=_BACKLOG,
            )
        )
        self._began: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self._thread.start()
        self._loop = self._began.result(_SERVER_START_S)

    def close(self) -> bool:
        """End the server and its streams. Return whether the thread has ended; if not, a request is being computed."""
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._streams.close)
        self._server.should_exit = True
        self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = _NUM_THREADS
        self._began.set_result(asyncio.get_running_loop())
        await self._server.serve(sockets=[self._listening])
