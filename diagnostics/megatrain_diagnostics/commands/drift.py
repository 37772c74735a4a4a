"""`megatrain diag drift RUN`: when and why the pace of a job changed."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from megatrain.commands.argument_types import Verbs, real_number
from megatrain.commands.printing import facts
from megatrain.formatting import count_text, names_text, ranks_text, time_text
from megatrain_diagnostics.analysis.drift import Drift, LevelChange, analyze_drift
from megatrain_diagnostics.analysis.drift_causes import EXPLAINS, Moved
from megatrain_diagnostics.analysis.trends import Trend
from megatrain_diagnostics.commands.arguments import add_analysis, add_steps, chosen_round, open_source, print_analysis

_MAX_RANKS_NAMED = 8
_MAX_MOVED = 4


def add_verb(verbs: Verbs) -> None:
    parser = add_analysis(verbs, "drift", "when and why the pace of a job changed", run, add_steps)
    parser.add_argument(
        "--peak-tflops",
        type=real_number("a number above 0", lambda value: 0.0 < value < 1e6),
        default=None,
        metavar="T",
        help="peak of a device, for MFU (default: the peak that the trainer recorded, telemetry.peak_tflops)",
    )


def run(args: argparse.Namespace) -> int:
    """Print how the pace changed. Raises: DataError if no step has a known duration."""
    source = open_source(args)
    found = analyze_drift(source, chosen_round(args, source), *args.steps)
    return print_analysis(
        args,
        lambda: {"place": args.place, **_document(found, args.peak_tflops)},
        lambda: _lines(found, args.peak_tflops),
    )


def _document(found: Drift, peak_tflops: float | None) -> dict[str, Any]:
    return {
        **asdict(found),
        "mfu": _mfu(found, peak_tflops),
        "changes": [_change_document(change) for change in found.changes],
        "rate_changes": [_change_document(change) for change in found.rate_changes],
    }


def _change_document(change: LevelChange) -> dict[str, Any]:
    moved = [{**asdict(each), "delta_s": each.delta_s} for each in change.moved]
    return {**asdict(change), "shift": change.shift, "is_of_work": change.is_of_work, "moved": moved}


def _mfu(found: Drift, peak_tflops: float | None) -> float | None:
    """Return the median MFU; None if peak or FLOPs are not known."""
    peak_flops = found.peak_flops if peak_tflops is None else peak_tflops * 1e12
    if peak_flops <= 0 or found.rate <= 0 or not found.rate_name.startswith("FLOP"):
        return None
    return found.rate / peak_flops


def _lines(found: Drift, peak_tflops: float | None) -> list[str]:
    pairs = [
        ("steps", f"{found.first_step} to {found.last_step}: {found.num_steps}"),
        ("left out", f"{count_text(found.num_left_out, 'step')} at the beginning or after checkpoints and evaluations"),
        ("step time", f"{found.step_s * 1e3:.3f} ms, {_trend(found.step_trend, 1e3, 'ms')}"),
    ]  # fmt: skip
    if found.rate_name:
        pairs.append(("pace", f"{found.rate:.4g} {found.rate_name}, {_trend(found.rate_trend, 1.0, '')}"))
    mfu = _mfu(found, peak_tflops)
    if mfu is not None:
        pairs.append(("MFU", f"{mfu:.2%}"))
    pairs.append(("gc", f"{found.gc_share:.3%} of the time; a collection: {_trend(found.gc_trend, 1e3, 'ms')}"))
    if found.void >= 0:
        pairs.append(
            ("void", f"{found.void:.2%} of the time no timed operation ran, {_trend(found.void_trend, 100, '%')}")
        )
    pairs.append(("stagger", _stagger(found)))
    for latency in found.latencies:
        pairs.append((
            "issue latency",
            f"{latency.operation}: median {latency.median_s * 1e3:.3f} ms, p99 {latency.p99_s * 1e3:.3f} ms",
        ))  # fmt: skip
    if found.num_sampled and not found.latencies:
        pairs.append(("issue latency", "not known: the work was timed by the host's clock, not on the device"))
    pairs.append(("hour of day", _hours(found)))
    lines = [*facts(pairs), ""]
    if not found.changes and not found.rate_changes:
        lines.append("no lasting change of 10 % or more")
    for change in found.changes:
        lines += _change_lines("step time", change)
    for change in found.rate_changes:
        lines += _change_lines("time for the same work", change)
    return lines + [f"note: {note}" for note in found.notes]


def _change_lines(what: str, change: LevelChange) -> list[str]:
    levels = f"{change.before_s * 1e3:.3f} ms to {change.after_s * 1e3:.3f} ms, {change.shift:+.1%}"
    when = f"step {change.step}, {time_text(change.at_unix_s)}"
    lines = [f"{what} changed at {when}: {levels} (posterior {change.posterior:.3f})"]
    if change.is_of_work:
        lines.append(
            f"  the work of a step changed by {change.work_shift:+.1%}, which explains this: nothing became slower"
        )
    lines += [_moved(moved) for moved in change.moved[:_MAX_MOVED]]
    if not change.is_of_work and not any(moved.explained >= EXPLAINS for moved in change.moved):
        lines.append("  no operation's own time explains it: check whether ranks begin at different times (stagger)")
    return lines


def _moved(one: Moved) -> str:
    word = "because of" if one.explained >= EXPLAINS else "also changed:"
    hosts = f" on {names_text(one.hosts)}" if one.hosts else ""
    return (
        f"  {word} {one.operation}: {one.before_s * 1e3:.3f} ms to {one.after_s * 1e3:.3f} ms a step, "
        f"{one.explained:.0%} of the change; {ranks_text(one.ranks, _MAX_RANKS_NAMED)}{hosts}"
    )


def _stagger(found: Drift) -> str:
    stagger = found.stagger
    if stagger is None:
        return "not known: no reduce-scatter of several ranks was recorded span by span"
    kind = "nearly always the same: a straggler" if stagger.is_persistent else "not always the same"
    return (
        f"median {stagger.median_s * 1e3:.3f} ms at the reduce-scatter, {_trend(stagger.trend, 1e3, 'ms')}; "
        f"last most often: rank {stagger.last_rank} {stagger.last_host} ({stagger.last_share:.0%}; {kind})"
    )


def _trend(trend: Trend | None, factor: float, unit: str) -> str:
    if trend is None:
        return "too few values for a trend"
    word = "rising" if trend.is_rising else "falling" if trend.is_falling else ""
    return f"{word} by {trend.per_1000 * factor:+.4g} {unit}".rstrip() + " in 1000 steps" if word else "steady"


def _hours(found: Drift) -> str:
    if found.hours is None:
        return "not known: the steps cover less than 20 hours, or are too few"
    if not found.hours.is_notable:
        return "no difference"
    return f"slowest at {found.hours.slowest:02d}:00 UTC, {found.hours.excess:+.1%} over the median hour"
