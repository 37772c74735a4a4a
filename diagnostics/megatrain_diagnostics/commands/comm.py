"""`megatrain diag comm RUN`: bandwidths, slow links and hosts, and how much communication is overlapped."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from megatrain.commands.argument_types import Verbs
from megatrain.commands.printing import facts, table
from megatrain.contracts.errors import DataError
from megatrain.formatting import bytes_text, ranks_text
from megatrain_diagnostics.analysis.comm import Communication, analyze_communication
from megatrain_diagnostics.analysis.slow_links import SLOW_EXCESS, SlowLinks
from megatrain_diagnostics.analysis.step_windows import (
    full_steps,
    known_steps,
    newest_steps,
    read_step_events,
    spans_of_full_steps,
)
from megatrain_diagnostics.commands.arguments import add_analysis, add_steps, chosen_round, open_source, print_analysis
from megatrain_diagnostics.commands.overlap_table import overlap_document, overlap_table
from megatrain_diagnostics.events.tables import Spans

_NUM_DEFAULT_STEPS = 10


def add_verb(verbs: Verbs) -> None:
    text = "bandwidths, slow links and hosts, exposed and overlapped communication"
    add_analysis(verbs, "comm", text, run, add_steps)


def run(args: argparse.Namespace) -> int:
    """Analyze communication. Raises: DataError when none of these steps was recorded span by span."""
    source = open_source(args)
    round_number = chosen_round(args, source)
    first, last = args.steps
    spans = source.read(Spans, spans_of_full_steps(round_number, first, last))
    known = full_steps(spans).tolist()
    if not known:
        raise DataError(
            f"{args.place}: no such step was recorded span by span; there are {known_steps(source, round_number)}"
        )
    # by default only the newest steps are analyzed: the analysis of all steps of a long job takes too much memory
    chosen = known if args.steps != (None, None) else newest_steps(spans, _NUM_DEFAULT_STEPS).tolist()
    events = read_step_events(source, round_number, chosen[0], chosen[-1])
    found = analyze_communication(events, chosen[0], chosen[-1])
    head = {"place": args.place, "round": round_number}
    return print_analysis(args, lambda: {**head, **_document(found)}, lambda: _lines(found))


def _document(found: Communication) -> dict[str, Any]:
    return {
        **asdict(found),
        "overlaps": [overlap_document(overlap) for overlap in found.overlaps],
        "slow": {
            **asdict(found.slow),
            "groups": [{**asdict(group), "excess": group.excess} for group in found.slow.groups],
        },
    }


def _lines(found: Communication) -> list[str]:
    steps = f"{found.steps[0]} to {found.steps[-1]} ({len(found.steps)})" if found.steps else "none"
    pairs = [
        ("steps", steps),
        ("ranks", str(found.num_ranks)),
        ("exposed", f"{found.exposed_percent:.2f} % of the time; bubble {found.bubble_percent:.2f} %"),
        ("exchanges", f"{found.num_exchanges:,}, {found.num_incomplete:,} of them without the spans of all members"),
    ]
    if found.num_hidden:
        why = "no rank that came before the last one waited for the end, so the duration is not known"
        pairs.append(("overlapped", f"{found.num_hidden:,}: {why}"))
    if found.num_too_short:
        pairs.append(
            (
                "too short",
                f"{found.num_too_short:,}: ended before the last rank began, within the error of the clocks",
            )
        )
    lines = facts(pairs)
    if found.overlaps:
        lines += ["", *overlap_table("a rank and step", found.overlaps)]
    if found.bandwidths:
        speeds: list[tuple[str, ...]] = [
            ("group", "operation", "size", "ranks", "count", "median", "p90", "waited", "algorithm", "bus", "bus p10")
        ]
        speeds += [
            (
                *(speed.group, speed.operation, speed.size, str(speed.num_ranks), f"{speed.count:,}"),
                *map(_ms, (speed.transfer_s, speed.transfer_p90_s, speed.wait_s)),
                *map(_rate, (speed.algorithm_bandwidth, speed.bus_bandwidth, speed.bus_bandwidth_p10)),
            )
            for speed in found.bandwidths
        ]
        lines += ["", *table(speeds, left=(0, 1, 2))]
    return lines + _slow_lines(found.slow) + [f"note: {note}" for note in found.notes]


def _slow_lines(slow: SlowLinks) -> list[str]:
    lines = [""]
    if not slow.num_compared:
        lines.append("slow links: not known; a group is compared only if there are two others of its kind")
    elif not slow.groups:
        lines.append(
            f"slow links: none of {slow.num_compared} groups is more than {SLOW_EXCESS:.0%} slower than similar groups"
        )
    for group in slow.groups:
        lines.append(
            f"slow: {group.group} of {ranks_text(group.ranks)} ({', '.join(group.hosts)}): {group.operation} "
            f"{_ms(group.transfer_s)} instead of {_ms(group.expected_s)}, {group.excess:+.0%}"
        )
    for host in slow.hosts:
        lines.append(
            f"suspected: host {host.host}: {host.num_slow} of its {host.num_groups} groups and links are slow, "
            f"{host.excess:+.0%} on average"
        )
    for spot in slow.hot_spots:
        lines.append(
            f"hot spot: step {spot.step}, {spot.operation} of {ranks_text(spot.ranks)}: {_ms(spot.transfer_s)} "
            f"instead of {_ms(spot.expected_s)}"
        )
    for load in slow.unequal:
        lines.append(
            f"unequal: rank {load.rank} transfers {bytes_text(load.num_bytes)} by {load.operation} in {load.group}; "
            f"the mean of the group is {bytes_text(load.mean_bytes)}"
        )
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3f} GB/s"
