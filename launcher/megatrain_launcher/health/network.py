"""Checks the network interfaces: that what carries the ranks' traffic is up, as fast as before, and does not flap.

Whether a port that is down matters, only this host's history can say: a port that once was up is missed, one that never
was is not. Ethernet is read from /sys/class/net, InfiniBand and RoCE from /sys/class/infiniband.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.contracts.host_records import CheckOutcome
from megatrain_launcher.health.context import HealthContext
from megatrain_launcher.health.finding import Finding, failed, passed, skipped, warning
from megatrain_launcher.health.history import History

NAMES = ("network", "infiniband")
DEADLINE_S = 5.0
FLAPS = 4
"""Changes of the carrier since the last check: two times down and up again."""


@dataclass(frozen=True, slots=True)
class Link:
    """One interface or port. None: the driver does not tell."""

    name: str
    is_up: bool
    state: str
    speed_mbps: float | None = None
    num_downs: int | None = None
    """Changes of the carrier (Ethernet) or links lost (InfiniBand), since boot."""


def check_network(context: HealthContext, history: History) -> tuple[Finding, ...]:
    """Read the links of this host and compare them with what they were."""
    ethernet = read_interfaces(context.places.sys / "class/net")
    return (
        judge_interfaces(ethernet, context.network_interface, history.seen),
        judge_ports(read_ports(context.places.sys / "class/infiniband"), history.seen),
    )


def read_interfaces(directory: Path) -> list[Link]:
    """Return all interfaces but the loopback one; virtual ones too, because one may be chosen by name."""
    links = []
    for interface in sorted(directory.glob("*")):
        if interface.name == "lo" or not interface.is_dir():
            continue
        state = _read(interface / "operstate") or "unknown"
        speed = _read(interface / "speed")
        changes = _read(interface / "carrier_changes")
        # tunnels and some virtual interfaces never say more than "unknown", and work
        is_up = state == "up" or (state == "unknown" and _read(interface / "carrier") == "1")
        links.append(
            Link(
                interface.name,
                is_up,
                state,
                float(speed) if speed.isdigit() and int(speed) > 0 else None,
                int(changes) if changes.isdigit() and (interface / "device").exists() else None,
            )
        )
    return links


def read_ports(directory: Path) -> list[Link]:
    """Return the ports of all RDMA devices."""
    links = []
    for port in sorted(directory.glob("*/ports/*")):
        state = _read(port / "state")
        physical = _read(port / "phys_state")
        rate = re.match(r"([\d.]+) *Gb/sec", _read(port / "rate"))
        downs = _read(port / "counters/link_downed")
        links.append(
            Link(
                f"{port.parent.parent.name}:{port.name}",
                "ACTIVE" in state,
                ", ".join(part.partition(":")[2].strip() or part for part in (state, physical) if part) or "unknown",
                float(rate[1]) * 1000 if rate else None,
                int(downs) if downs.isdigit() else None,
            )
        )
    return links


def judge_interfaces(links: Sequence[Link], chosen: str, seen: Mapping[str, float]) -> Finding:
    """Return what the interfaces mean; `chosen` is runtime.network_interface. Pure."""
    name = NAMES[0]
    by_name = {link.name: link for link in links}
    if chosen == "lo":
        return passed(name, "lo is chosen: one host")
    if chosen and chosen not in by_name:
        there = ", ".join(by_name) or "none but lo"
        return failed(name, f"runtime.network_interface={chosen!r} is not there; there are: {there}")
    if chosen and not by_name[chosen].is_up:
        return failed(name, f"runtime.network_interface={chosen!r} is {by_name[chosen].state}")
    if not links:
        return passed(name, "no interface but lo: one host")
    if not chosen and not any(link.is_up for link in links):
        return warning(name, "no interface is up: " + ", ".join(f"{link.name} is {link.state}" for link in links))
    return _judged(name, links, chosen, seen)


def judge_ports(links: Sequence[Link], seen: Mapping[str, float]) -> Finding:
    """Return what the RDMA ports mean. Pure."""
    if not links:
        return skipped(NAMES[1], "no RDMA device")
    return _judged(NAMES[1], links, "", seen, is_needed=True)


def _judged(
    name: str, links: Sequence[Link], chosen: str, seen: Mapping[str, float], *, is_needed: bool = False
) -> Finding:
    """Judge each link against what it was. `is_needed`: every link that was up before carries the ranks' traffic."""
    problems: list[tuple[CheckOutcome, str]] = []
    remembered: dict[str, float] = {}
    for link in links:
        was_up = seen.get(f"link_up/{name}/{link.name}", 0.0) > 0
        speed_before = seen.get(f"link_mbps/{name}/{link.name}")
        downs_before = seen.get(f"link_downs/{name}/{link.name}")
        outcome = CheckOutcome.FAILED if is_needed or link.name == chosen else CheckOutcome.WARNING
        if was_up and not link.is_up:
            problems.append((outcome, f"{link.name} is {link.state}, it was up before"))
        elif link.is_up and speed_before and link.speed_mbps and link.speed_mbps < speed_before:
            problems.append(
                (outcome, f"{link.name} runs at {_speed(link.speed_mbps)}, before at {_speed(speed_before)}")
            )
        elif link.is_up:
            remembered[f"link_up/{name}/{link.name}"] = 1.0
            if link.speed_mbps:
                remembered[f"link_mbps/{name}/{link.name}"] = link.speed_mbps
        if link.num_downs is not None:
            remembered[f"link_downs/{name}/{link.name}"] = float(link.num_downs)
            more = link.num_downs - downs_before if downs_before is not None else 0
            if more >= FLAPS:
                problems.append(
                    (CheckOutcome.WARNING, f"{link.name} lost its link: {more:.0f} changes since the last check")
                )
    if problems:
        is_failed = any(outcome is CheckOutcome.FAILED for outcome, _ in problems)
        text = "; ".join(problem for _, problem in problems)
        return Finding(name, CheckOutcome.FAILED if is_failed else CheckOutcome.WARNING, text, seen=remembered)
    state = ", ".join(
        f"{link.name} {'up' if link.is_up else link.state}" + (f" {_speed(link.speed_mbps)}" if link.speed_mbps else "")
        for link in links
    )
    return replace(passed(name, state), seen=remembered)


def _speed(mbps: float) -> str:
    return f"{mbps / 1000:g} Gbit/s" if mbps >= 1000 else f"{mbps:g} Mbit/s"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not there, or the driver has no such value
        return ""
