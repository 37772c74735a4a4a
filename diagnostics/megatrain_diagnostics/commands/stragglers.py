"""`megatrain diag stragglers`: which ranks make the job slow, why, and with which confidence."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatrain.commands.argument_types import Verbs, real_number, whole_number
from megatrain.commands.printing import facts
from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.formatting import count_text, names_text, ranks_text, seconds_text
from megatrain_diagnostics.analysis.findings import Finding, Thresholds
from megatrain_diagnostics.analysis.sentences import findings_headline
from megatrain_diagnostics.analysis.stored_stragglers import stored_stragglers
from megatrain_diagnostics.analysis.straggler_history import StragglerHistory
from megatrain_diagnostics.commands.arguments import add_analysis, add_steps, chosen_round, open_source, print_analysis
from megatrain_diagnostics.events.roster import Roster, read_roster

_MAX_SHOWN = 12


def add_verb(verbs: Verbs) -> None:
    """Add the subcommand `stragglers`."""
    config = DiagnosticsConfig()
    parser = add_analysis(verbs, "stragglers", "which ranks and hosts make the job slow, and why", run, add_steps)
    parser.add_argument(
        "--excess",
        type=real_number("a number above 0", lambda value: 0.0 < value < float("inf")),
        default=config.straggler_excess,
        metavar="PART",
        help="least excess over the peers, as a fraction (default: %(default)s)",
    )
    parser.add_argument(
        "--score",
        type=real_number("a number of at least 0", lambda value: 0.0 <= value < float("inf")),
        default=config.straggler_score,
        help="least robust score (default: %(default)s)",
    )
    parser.add_argument(
        "--lasting",
        type=whole_number(2, 1024),
        default=config.straggler_steps,
        metavar="STEPS",
        help="least number of steps for which a rank is slow (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings. Raises: DataError if there are no events of these steps."""
    source = open_source(args)
    round_number = chosen_round(args, source)
    roster = read_roster(source, round_number)
    found = stored_stragglers(source, roster, Thresholds(args.excess, args.score, args.lasting), args.steps)
    head = {"place": args.place, "round": round_number}
    return print_analysis(args, lambda: {**head, **_document(found)}, lambda: _lines(found, roster))


def _document(found: StragglerHistory) -> dict[str, Any]:
    end = found.assessment
    return {
        "first_step": end.first_step,
        "last_step": end.last_step,
        "num_steps": found.num_compared,
        "num_left_out": end.num_left_out,
        "is_enough": end.is_enough,
        "findings": [
            {
                **asdict(finding),
                "cause": finding.cause.value,
                "confidence": finding.confidence.value,
                "is_over": finding.key in found.ended,
            }
            for finding in found.findings
        ],
        "thresholds": None if end.thresholds is None else asdict(end.thresholds),
        "host_scores": dict(end.host_scores),
        "ranks_without_peers": list(end.ranks_without_peers),
        "silent_ranks": list(end.silent_ranks),
        "num_wrong_rows": found.num_wrong,
    }


def _lines(found: StragglerHistory, roster: Roster) -> list[str]:
    end = found.assessment
    lines = [findings_headline(found.findings, is_enough=end.is_enough)]
    for finding in found.findings:
        lines += ["", *_of_finding(finding, finding.key in found.ended)]
    lines.append("")
    pairs = [
        ("steps", f"{found.num_compared} compared, {end.num_left_out} left out (first steps, checkpoints, evaluations)")
    ]
    if end.thresholds is not None:
        pairs.append(("thresholds", _thresholds(end.thresholds)))
    if end.host_scores:
        pairs.append(("hosts", _highest(end.host_scores)))
    if end.ranks_without_peers:
        pairs.append(("not compared", f"{ranks_text(end.ranks_without_peers)}: no other rank does the same work"))
    if end.silent_ranks:
        pairs.append(("silent", f"{ranks_text(end.silent_ranks)} sent no telemetry for the newest steps"))
    if found.num_wrong:
        pairs.append(("skipped", count_text(found.num_wrong, "impossible row")))
    return [*lines, *facts([("ranks", f"{roster.layout.world_size} ({roster.layout})"), *pairs])]


def _of_finding(finding: Finding, is_over: bool) -> list[str]:
    seen = f"seen in {finding.num_seen} of {finding.num_steps}{', ended since' if is_over else ''}"
    pairs = [
        (
            "cause",
            finding.cause.value
            + (" (another host would be faster)" if finding.cause.is_of_host else " (not due to the host)"),
        ),
        ("confidence", finding.confidence.value),
        ("where", f"{', '.join(finding.hosts) or '-'}; {ranks_text(finding.ranks)}"),
        ("when", f"steps {finding.first_step} to {finding.last_step}, {seen}"),
        (
            "excess",
            f"{100 * finding.excess:.1f} % ({seconds_text(finding.excess_s)} a step), score {finding.score:.1f}",
        ),
        ("victims", f"{count_text(finding.num_victims, 'rank')} waiting for it"),
        ("gain", f"at most {seconds_text(finding.gain_s)} of {seconds_text(finding.step_s)} a step"),
    ]
    return [*facts(pairs), *(f"- {sentence}" for sentence in finding.evidence)]


def _thresholds(least: Thresholds) -> str:
    return f"{100 * least.excess:g} % over the peers and score {least.score:.1f}, for {least.num_steps} steps"


def _highest(scores: Mapping[str, float]) -> str:
    ordered = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return f"score {names_text([f'{host} {score:.1f}' for host, score in ordered], _MAX_SHOWN)}"
