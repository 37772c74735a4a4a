"""Checks the network interfaces: those for the ranks' traffic are up, as fast as before, and do not flap.

A link that is down is a problem if it was up before, by this host's history, or if it is runtime.network_interface. If
all interfaces are down, the check warns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatrain.contracts.records.host_records import CheckOutcome
from megatrain_job.devices.links import LinkReading, read_interfaces, read_ports
from megatrain_launcher.health.context import HealthContext, HealthFinding, failed, passed, skipped, warning
from megatrain_launcher.health.history import HealthHistory

NAMES = ("network", "infiniband")
DEADLINE_S = 5.0
FLAPS = 4
"""A link that changed its carrier this often since the last check is flapping."""


def check_network(context: HealthContext, history: HealthHistory) -> tuple[HealthFinding, ...]:
    """Read the links of this host and compare them with their earlier state."""
    ethernet = read_interfaces(context.places.sys / "class/net")
    return (
        judge_interfaces(ethernet, context.network_interface, history.seen),
        judge_ports(read_ports(context.places.sys / "class/infiniband"), history.seen),
    )


def judge_interfaces(links: Sequence[LinkReading], chosen: str, seen: Mapping[str, float]) -> HealthFinding:
    """Judge the interfaces. `chosen`: runtime.network_interface."""
    name = NAMES[0]
    by_name = {link.name: link for link in links}
    if chosen == "lo":
        return passed(name, "lo is chosen: one host")
    if chosen and chosen not in by_name:
        there = ", ".join(by_name) or "none but lo"
        return failed(name, f"runtime.network_interface={chosen!r} does not exist; the interfaces are: {there}")
    if chosen and not by_name[chosen].is_up:
        return failed(name, f"runtime.network_interface={chosen!r} is {by_name[chosen].state}")
    if not links:
        return passed(name, "no interface but lo: one host")
    if not chosen and not any(link.is_up for link in links):
        return warning(name, "no interface is up: " + ", ".join(f"{link.name} is {link.state}" for link in links))
    return _judged(name, links, chosen, seen)


def judge_ports(links: Sequence[LinkReading], seen: Mapping[str, float]) -> HealthFinding:
    """Judge the RDMA ports."""
    if not links:
        return skipped(NAMES[1], "no RDMA device")
    return _judged(NAMES[1], links, "", seen, is_needed=True)


def _judged(
    name: str, links: Sequence[LinkReading], chosen: str, seen: Mapping[str, float], *, is_needed: bool = False
) -> HealthFinding:
    """Judge each link against its earlier state.

    `is_needed`: a problem of any link makes the host unfit, because every link carries the ranks' traffic.
    """
    problems: list[tuple[CheckOutcome, str]] = []
    remembered: dict[str, float] = {}
    for link in links:
        was_up = seen.get(f"link_up/{name}/{link.name}", 0.0) > 0
        speed_before = seen.get(f"link_mbps/{name}/{link.name}")
        downs_before = seen.get(f"link_downs/{name}/{link.name}")
        outcome = CheckOutcome.FAILED if is_needed or link.name == chosen else CheckOutcome.WARNING
        if was_up and not link.is_up:
            problems.append((outcome, f"{link.name} is {link.state}; it was up before"))
        elif link.is_up and speed_before and link.speed_mbps and link.speed_mbps < speed_before:
            problems.append(
                (outcome, f"{link.name} runs at {_speed(link.speed_mbps)}, down from {_speed(speed_before)}")
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
                    (CheckOutcome.WARNING, f"{link.name} flaps: its link changed {more:.0f} times since the last check")
                )
    if problems:
        is_failed = any(outcome is CheckOutcome.FAILED for outcome, _ in problems)
        text = "; ".join(problem for _, problem in problems)
        return HealthFinding(name, CheckOutcome.FAILED if is_failed else CheckOutcome.WARNING, text, seen=remembered)
    state = ", ".join(
        f"{link.name} {'up' if link.is_up else link.state}" + (f" {_speed(link.speed_mbps)}" if link.speed_mbps else "")
        for link in links
    )
    return replace(passed(name, state), seen=remembered)


def _speed(mbps: float) -> str:
    return f"{mbps / 1000:g} Gbit/s" if mbps >= 1000 else f"{mbps:g} Mbit/s"
