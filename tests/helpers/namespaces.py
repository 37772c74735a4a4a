"""Several hosts on one machine: network namespaces on separate switches, whose links can be cut.

Each network is a bridge; this process is on all of them too, with the last address. Names and addresses contain the
number of this process, so concurrent tests do not conflict, and the next test removes what a killed test left behind.
Needs root and iproute2.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.helpers.require import require

_OWN_ADDRESS = 254
_MOST_NETWORKS = 4
_NAME = re.compile(r"mt([0-9]+)(?:-|o[0-9]$)")
"""The name of a namespace or of a link of the process with this number."""
_LARGEST_SENT = str(16 << 10)
"""Bytes in one packet, less than a burst of a slow link."""


class HostNetwork:
    """Hosts 0 to num_hosts - 1 on each of `networks`; as a context manager it leaves nothing behind."""

    def __init__(self, num_hosts: int, networks: Sequence[str] = ("train",)) -> None:
        is_possible = os.geteuid() == 0 and None not in (shutil.which("ip"), shutil.which("tc"))
        require("network namespaces", found=is_possible, reason="they need root and the programs ip and tc")
        self.networks = tuple(networks)
        self.num_hosts = num_hosts
        # names of interfaces have at most 15 characters, and numbers of processes at most 7
        self._name = f"mt{os.getpid()}"
        self._first_network = os.getpid() * _MOST_NETWORKS

    def address(self, network: str, host: int) -> str:
        """Return the address of a host on a network."""
        return f"{self._network_prefix(network)}.{host + 1}"

    def own_address(self, network: str) -> str:
        """Return the address at which the hosts reach this process."""
        return f"{self._network_prefix(network)}.{_OWN_ADDRESS}"

    def enter(self, host: int) -> list[str]:
        """Return the start of a command line that runs on a host."""
        return ["ip", "netns", "exec", self._host(host)]

    def cut(self, host: int, network: str) -> None:
        """Disconnect the link: nothing arrives and nothing is refused."""
        self._run("netns", "exec", self._switch, "ip", "link", "set", "dev", f"p{host}", "down", network=network)

    def mute(self, host: int, network: str) -> None:
        """Drop all traffic between a host and the others, although its link is up."""
        self._inside(network, "link", "set", "dev", f"p{host}", "nomaster")

    def slow_down(self, host: int, network: str, rate: str, burst_kb: int = 64, queue: str = "400ms") -> None:
        """Limit the traffic to and from a host to `rate`, "20mbit" for instance, after a first `burst_kb`. queue: how
        long packets may wait before they are dropped."""
        for space, device in ((self._switch, f"p{host}"), (self._host(host), network)):
            command = ["netns", "exec", space, "tc", "qdisc", "replace", "dev", device, "root", "tbf"]
            self._run(*command, "rate", rate, "burst", f"{burst_kb}kb", "latency", queue, network=network)

    def speed_up(self, host: int, network: str) -> None:
        """Remove the limit again."""
        for space, device in ((self._switch, f"p{host}"), (self._host(host), network)):
            self._run("netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root", network=network)

    def reconnect(self, host: int, network: str) -> None:
        self._run("netns", "exec", self._switch, "ip", "link", "set", "dev", f"p{host}", "up", network=network)

    def __enter__(self) -> Self:
        _remove_leftovers()
        try:
            for network in self.networks:
                self._build(network)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _network_prefix(self, network: str) -> str:
        """Return the first three bytes of a network's addresses: one of 16,384 networks below 10.64.0.0/10."""
        number = (self._first_network + self.networks.index(network)) % (64 << 8)
        return f"10.{64 + (number >> 8)}.{number & 255}"

    @property
    def _switch(self) -> str:
        return f"{self._name}-NET"

    def _host(self, host: int) -> str:
        return f"{self._name}-h{host}"

    def _build(self, network: str) -> None:
        number = self.networks.index(network)
        self._run("netns", "add", self._switch, network=network)
        self._inside(network, "link", "add", "name", "br0", "type", "bridge")
        self._inside(network, "link", "set", "dev", "br0", "up")
        own = f"{self._name}o{number}"
        self._run(
            "link", "add", "name", own, "type", "veth", "peer", "name", "own", "netns", self._switch, network=network
        )
        self._plug(network, "own")
        self._run("addr", "add", f"{self.own_address(network)}/24", "dev", own)
        self._run("link", "set", own, "up")
        for host in range(self.num_hosts):
            space = self._host(host)
            if number == 0:
                self._run("netns", "add", space)
                self._run("-n", space, "link", "set", "lo", "up")
            self._run(
                "link", "add", "name", network, "netns", space, "type", "veth", "peer", "name", f"p{host}",
                "netns", self._switch, network=network,
            )  # fmt: skip
            self._plug(network, f"p{host}")
            # tbf divides a packet that is larger than its burst into frames, each of which costs the CPU as much as the
            # whole packet; a connection keeps its initial size.
            for place, device in ((self._switch, f"p{host}"), (space, network)):
                self._run("-n", place, "link", "set", "dev", device, "gso_max_size", _LARGEST_SENT, network=network)
            self._run("-n", space, "addr", "add", f"{self.address(network, host)}/24", "dev", network)
            self._run("-n", space, "link", "set", network, "up")

    def _plug(self, network: str, port: str) -> None:
        self._inside(network, "link", "set", "dev", port, "master", "br0")
        self._inside(network, "link", "set", "dev", port, "up")

    def _inside(self, network: str, *arguments: str) -> None:
        self._run("-n", self._switch, *arguments, network=network)

    def _run(self, *arguments: str, network: str = "") -> None:
        command = ["ip", *(word.replace("-NET", f"-{network}") for word in arguments)]
        _run(command)

    def _remove(self) -> None:
        for number in range(len(self.networks)):
            with suppress(AssertionError):  # It may not exist yet.
                self._run("link", "del", "dev", f"{self._name}o{number}")
        spaces = [f"{self._name}-{network}" for network in self.networks]
        for space in [*map(self._host, range(self.num_hosts)), *spaces]:
            with suppress(AssertionError):
                self._run("netns", "del", space)


def _remove_leftovers() -> None:
    """Remove the namespaces and links of killed processes."""
    spaces = [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines()]
    links = [line.split()[0].partition("@")[0] for line in _run(["ip", "-brief", "link"]).splitlines()]
    for kind, names in (("link", links), ("netns", spaces)):
        for name in names:
            owner = _NAME.match(name)
            if owner is not None and not Path("/proc", owner[1]).exists():
                with suppress(AssertionError):  # A link disappears with its other end, or another test removed it.
                    _run(["ip", kind, "del", name])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
