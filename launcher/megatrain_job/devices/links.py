"""Network interfaces and RDMA ports as the kernel shows them below /sys/class/net and /sys/class/infiniband.

Counters start at 0 when the driver is loaded. None: the driver does not report the value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.files.system_files import system_text

SYS = Path("/sys")
_RETRANSMISSIONS = ("local_ack_timeout_err", "packet_seq_err", "rnr_nak_retry_err")
"""Counters of RDMA hardware (mlx5): data sent again because they, or their acknowledgment, did not arrive."""


@dataclass(frozen=True, slots=True)
class LinkReading:
    """One interface, or one port of an RDMA device ("mlx5_0:1")."""

    name: str
    is_up: bool
    state: str
    speed_mbps: float | None = None
    num_downs: int | None = None
    """Changes of the carrier (Ethernet) or links lost (InfiniBand)."""
    rx_errors: int | None = None
    tx_errors: int | None = None
    rx_dropped: int | None = None
    tx_dropped: int | None = None
    symbol_errors: int | None = None
    """InfiniBand only: invalid symbols that arrived, and link retrainings."""
    retransmissions: int | None = None
    is_hardware: bool = True
    """False: a virtual interface, such as a bridge or a container's veth device."""


def read_links(sys: Path = SYS) -> tuple[LinkReading, ...]:
    """Return the links that may carry the ranks' traffic: hardware interfaces, or, in a container without any, all that
    are up; and RDMA ports.
    """
    interfaces = read_interfaces(sys / "class/net")
    hardware = [link for link in interfaces if link.is_hardware]
    return (*(hardware or [link for link in interfaces if link.is_up]), *read_ports(sys / "class/infiniband"))


def read_interfaces(directory: Path) -> list[LinkReading]:
    """Return all interfaces except loopback; also virtual ones, because the configuration may name one."""
    links = []
    for interface in sorted(directory.glob("*")):
        if interface.name == "lo" or not interface.is_dir():
            continue
        state = system_text(interface / "operstate") or "unknown"
        speed = system_text(interface / "speed")
        is_hardware = (interface / "device").exists()
        counted = interface / "statistics"
        links.append(
            LinkReading(
                interface.name,
                # tunnels and some virtual interfaces always report "unknown", although they work
                is_up=state == "up" or (state == "unknown" and system_text(interface / "carrier") == "1"),
                state=state,
                speed_mbps=float(speed) if speed.isdigit() and int(speed) > 0 else None,
                num_downs=_count(interface / "carrier_changes") if is_hardware else None,
                rx_errors=_count(counted / "rx_errors"),
                tx_errors=_count(counted / "tx_errors"),
                rx_dropped=_count(counted / "rx_dropped"),
                tx_dropped=_count(counted / "tx_dropped"),
                is_hardware=is_hardware,
            )
        )
    return links


def read_ports(directory: Path) -> list[LinkReading]:
    """Return the ports of all RDMA devices."""
    links = []
    for port in sorted(directory.glob("*/ports/*")):
        state = system_text(port / "state")
        physical = system_text(port / "phys_state")
        rate = re.match(r"([0-9]+(?:\.[0-9]+)?) *Gb/sec", system_text(port / "rate"))
        counted, hardware = port / "counters", port / "hw_counters"
        links.append(
            LinkReading(
                f"{port.parent.parent.name}:{port.name}",
                is_up="ACTIVE" in state,
                state=", ".join(part.partition(":")[2].strip() or part for part in (state, physical) if part)
                or "unknown",
                speed_mbps=float(rate[1]) * 1000 if rate else None,
                num_downs=_count(counted / "link_downed"),
                rx_errors=_count(counted / "port_rcv_errors"),
                tx_errors=_count(counted / "local_link_integrity_errors"),
                rx_dropped=_count(hardware / "out_of_buffer"),
                tx_dropped=_count(counted / "port_xmit_discards"),
                symbol_errors=_sum(counted / "symbol_error", counted / "link_error_recovery"),
                retransmissions=_sum(*(hardware / name for name in _RETRANSMISSIONS)),
            )
        )
    return links


def _sum(*paths: Path) -> int | None:
    found = [count for path in paths if (count := _count(path)) is not None]
    return sum(found) if found else None


def _count(path: Path) -> int | None:
    text = system_text(path)
    return int(text) if text.isascii() and text.isdigit() else None
