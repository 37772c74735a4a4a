"""Attackers on a job's etcd, and their attempts: other users of the machine, and web pages."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.helpers.processes import descendants

_ATTEMPT_S = 0.5


def tcp_ports(pid: int) -> set[int]:
    """Return the TCP ports that a process listens on."""
    sockets = set()
    for link in _listed(Path(f"/proc/{pid}/fd")):
        with suppress(OSError):
            sockets.add(os.readlink(link))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _listed(directory: Path) -> list[Path]:
    """Return the entries of a directory of /proc; none if its process has ended."""
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def asked(port: int, path: str, body: Mapping[str, Any], **headers: str) -> tuple[int, bytes, Mapping[str, str]]:
    """Send a request to a port as any user may; return status, content and headers. Raises: OSError, HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ATTEMPT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


class Racer:
    """An attacker on this machine that tries continuously to become root of every etcd that a test starts."""

    def __init__(self) -> None:
        self._others = set(descendants(os.getpid()))
        self.won: list[int] = []
        self.num_tries = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="racer")

    def _run(self) -> None:
        while not self._closed.is_set():
            for pid in set(descendants(os.getpid())) - self._others:
                for port in tcp_ports(pid):
                    self._try(port)

    def _try(self, port: int) -> None:
        self.num_tries += 1
        with suppress(OSError, http.client.HTTPException):
            status, _, _ = asked(port, "/v3/auth/user/add", {"name": "root", "password": "the racer's"})
            if status == 200:
                self.won.append(port)
                asked(port, "/v3/auth/role/add", {"name": "root"})
                asked(port, "/v3/auth/user/grant", {"user": "root", "role": "root"})
                asked(port, "/v3/auth/enable", {})


@contextmanager
def racing() -> Iterator[Racer]:
    """Run an attacker during the block."""
    racer = Racer()
    racer._thread.start()
    try:
        yield racer
    finally:
        racer._closed.set()
        racer._thread.join()
