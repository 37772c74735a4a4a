"""Makes the document of /whatif: what stragglers cost, the sources of that cost, and what each remedy gains and costs.

The cost of a restart and the rule that weighs it are those of the driver (megatrain_job.jobs.lost_time, ADR 0023).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatrain.formatting import count_text, names_text, seconds_text
from megatrain_dashboard.api.stragglers.document import ActionBalance, PartDocument, WhatIfDocument
from megatrain_diagnostics.analysis.findings import Finding
from megatrain_diagnostics.analysis.whatif import WhatIf
from megatrain_diagnostics.analysis.whatif.figures import MIN_PART_EXPLAINED, advice

_FITS = 0.05
"""The page reports a replay that takes longer than its step by more than this fraction."""
_MAX_PARTS = 256
_MAX_RANKS = 1024
_MAX_ACTIONS = 16


@dataclass(frozen=True, slots=True)
class RemedyCost:
    """The cost of a remedy, which is a restart, and the number of steps over which its gain counts; None: not known."""

    remaining_steps: int | None
    cost_s: float
    cost_text: str


def whatif_document(
    round_number: int,
    result: WhatIf,
    findings: Sequence[Finding],
    worst_hosts: Sequence[str],
    remedy_cost: RemedyCost,
    notes: Iterable[str] = (),
) -> WhatIfDocument:
    """Return the document. `findings`: those that hold now. `worst_hosts`: the hosts of the result's worst ranks."""
    steps = tuple(sorted(result.measured_s))
    measured_s, replayed_s = _mean(result.measured_s), _mean(result.without_gaps_s)
    return WhatIfDocument.of(
        result,
        round=round_number,
        steps=steps,
        measured_s=measured_s,
        replayed_s=replayed_s,
        ideal_s=_mean(result.ideal_s),
        m_w=result.workers.rem,
        m_s=result.last_stage.rem,
        worst_ranks=result.worst_ranks[:_MAX_RANKS],
        by_operation=_parts(result.parts.by_optype.overall),
        by_stage=_parts(result.parts.by_stage.overall),
        by_dp_rank=_parts(result.parts.by_dp_rank.overall),
        slowdown_by_step=tuple(result.slowdown_by_step[step] for step in steps),
        by_cause=_by_cause(findings),
        advice="" if findings else advice(result),
        actions=tuple(_actions(result, findings, worst_hosts, remedy_cost))[:_MAX_ACTIONS],
        notes=(*notes, *_fit(measured_s, replayed_s), *result.notes),
    )


def _mean(by_step: Mapping[int, float]) -> float:
    return sum(by_step.values()) / len(by_step)


def _fit(measured_s: float, replayed_s: float) -> Iterable[str]:
    """Yield a note if a replay takes longer than the recorded step.

    Its operations then wait where the recorded ones did not.
    """
    if replayed_s > measured_s * (1.0 + _FITS):
        yield (
            f"A replayed step takes {seconds_text(replayed_s)}, the recorded one took {seconds_text(measured_s)}: "
            "some operations overlapped in reality and wait for each other in the replay (without an accelerator, the "
            "recorded end of an exchange is when its result is used). The slowdown compares two replays, so most of "
            "this error cancels; durations in seconds are too long."
        )


def _parts(overall: dict[str, float]) -> tuple[PartDocument, ...]:
    return tuple(PartDocument(name=name, slowdown=value) for name, value in list(overall.items())[:_MAX_PARTS])


def _by_cause(findings: Sequence[Finding]) -> tuple[PartDocument, ...]:
    """Return how much longer a step takes because of each cause that was found."""
    gains: dict[str, float] = {}
    step_s = 0.0
    for finding in findings:
        gains[str(finding.cause)] = gains.get(str(finding.cause), 0.0) + finding.gain_s
        step_s = max(step_s, finding.step_s)
    parts = [
        PartDocument(name=cause, slowdown=step_s / (step_s - gain_s))
        for cause, gain_s in gains.items()
        if 0.0 < gain_s < step_s
    ]
    return tuple(sorted(parts, key=lambda part: -part.slowdown))


def _actions(
    result: WhatIf, findings: Sequence[Finding], worst_hosts: Sequence[str], remedy_cost: RemedyCost
) -> Iterable[ActionBalance]:
    """Yield the remedies: first those for findings, and last doing nothing."""
    named: set[str] = set()
    for finding in findings:
        if finding.cause.is_of_host and finding.hosts and not named.issuperset(finding.hosts):
            named.update(finding.hosts)
            yield _balance("evict", names_text(finding.hosts), finding.gain_s, remedy_cost)
    gain_s = result.workers.tori - result.workers.trem
    if worst_hosts and result.workers.rem >= MIN_PART_EXPLAINED and not named.issuperset(worst_hosts):
        yield _balance("evict", names_text(worst_hosts), gain_s, remedy_cost)
    gain_s = result.last_stage.tori - result.last_stage.trem
    if result.has_stages and gain_s > 0.0:
        yield _balance("move layers off the last stage with parallel.layers_per_chunk", "", gain_s, remedy_cost)
    yield ActionBalance(
        action="nothing", target="", gain_s_per_step=0.0, gain_s=0.0, cost_s=0.0, is_worth_it=None,
        text="costs nothing and gains nothing",
    )  # fmt: skip


def _balance(action: str, target: str, gain_s_per_step: float, remedy_cost: RemedyCost) -> ActionBalance:
    gain_s_per_step = max(0.0, gain_s_per_step)
    steps = remedy_cost.remaining_steps
    gain_s = None if steps is None else gain_s_per_step * steps
    cost = f"a restart costs {seconds_text(remedy_cost.cost_s)} ({remedy_cost.cost_text})"
    rest = "the number of remaining steps is not known" if steps is None or gain_s is None else (
        f"over {count_text(steps, 'step')} {seconds_text(gain_s)}"
    )  # fmt: skip
    return ActionBalance(
        action=action,
        target=target,
        gain_s_per_step=gain_s_per_step,
        gain_s=gain_s,
        cost_s=remedy_cost.cost_s,
        is_worth_it=None if gain_s is None else gain_s > remedy_cost.cost_s,
        text=f"at most {seconds_text(gain_s_per_step)} a step, {rest}; {cost}",
    )
