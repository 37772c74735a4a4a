"""A real S3 server in this process (moto), behind a WSGI program that refuses requests, or loses or delays answers."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest

from tests.helpers.require import require_module
from tests.helpers.waiting import DEADLINE_S


class Fault(Enum):
    """The fate of a request."""

    REFUSED = "503 before anything is done"
    LOST = "done, and 503 in place of its answer"


Hook = Callable[[str, str], Fault | None]
"""Called before each request with its method and key, "" for the bucket; it may wait."""


class FaultyS3:
    """A WSGI program that calls `hook` for the fate of each request before moto gets it.

    Requests reach moto one at a time: S3 decides a conditional write at once, while moto checks first and then writes.
    """

    def __init__(self, application: Any) -> None:
        self._application = application
        self._turn = threading.Lock()
        self.hook: Hook = lambda method, key: None

    def __call__(self, environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        key = environment["PATH_INFO"].lstrip("/").partition("/")[2]
        fault = self.hook(environment["REQUEST_METHOD"], key)
        if fault is None:
            with self._turn:
                return list(self._application(environment, start_response))
        if fault is Fault.LOST:
            with self._turn:
                list(self._application(environment, lambda *_: None))
        start_response("503 Slow Down", [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>"]


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Run a server with the bucket "bucket" and direct s3:// to it until the end of the block."""
    for package in ("s3fs", "moto"):
        require_module(package)
    from fsspec.config import conf
    from moto.server import DomainDispatcherApplication, create_backend_app
    from s3fs import S3FileSystem
    from werkzeug.serving import make_server

    application = FaultyS3(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    # moto keeps its buckets for the life of the process: another server may have left some.
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST"), timeout=DEADLINE_S).close()
    settings = {
        "endpoint_url": url, "key": "key", "secret": "secret",
        "config_kwargs": {"retries": {"max_attempts": 1}, "read_timeout": 60, "region_name": "us-east-1"},
    }  # fmt: skip
    monkeypatch.setitem(conf, "s3", settings)
    monkeypatch.setattr(S3FileSystem, "retries", 1)  # Each own retry would pause for more than a second.
    S3FileSystem.clear_instance_cache()
    S3FileSystem().mkdir("bucket")
    try:
        yield application
    finally:
        S3FileSystem.clear_instance_cache()
        server.shutdown()
        thread.join()
        server.server_close()
