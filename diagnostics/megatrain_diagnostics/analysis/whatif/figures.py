"""Returns the figures of a what-if analysis by the field names of the public tool, and a recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.formatting import ranks_text
from megatrain_diagnostics.analysis.whatif.metrics import (
    DECOMPOSED_FROM,
    Decomposition,
    Explained,
    PartSlowdowns,
    WhatIf,
)
from megatrain_diagnostics.analysis.whatif.operations import JobShape

STRAGGLING_FROM = 1.1
"""A job with at least this slowdown is called straggling (OSDI'25 sec. 4)."""
MIN_PART_EXPLAINED = 0.5
"""The recommendation names a cause that explains at least this fraction of the slowdown."""
_WAYS = (("dp_rank", "by_dp_rank"), ("stage", "by_stage"), ("optype", "by_optype"))


def public_figures(result: WhatIf, shape: JobShape) -> dict[str, Any]:
    """Return all figures with the field names of the public tool's three result files.

    Names that occur in two of the files are in "mw" and "ms", and also at the top level if their values are equal.
    Parts of a slowdown below 3 % are null, as in those files.
    """
    blocking = result.parts if result.slowdown >= DECOMPOSED_FROM else None
    figures: dict[str, Any] = {
        "job_meta": shape.public(),
        "step_t_base": _texts(result.measured_s),
        "step_t_nodelay": _texts(result.without_gaps_s),
        "step_t_noblk": _texts(result.ideal_s),
        "launch_slowdown": result.launch_slowdown,
        "blocking_slowdown": result.slowdown,
        "blocking_step_slowdown": _texts(result.slowdown_by_step),
        "launch_step_slowdown": _texts(result.launch_slowdown_by_step),
    }
    for suffix, is_overall in (("", True), ("_per_step", False)):
        for way, attribute in _WAYS:
            for cause, parts in (("blocking", blocking), ("launch", result.launch_parts)):
                figures[f"{cause}_decompose_by_{way}{suffix}"] = _part_figures(parts, attribute, is_overall)
    workers, last_stage = _explained(result.workers), _explained(result.last_stage)
    return {
        **figures,
        "mw": {**workers, "Mw": result.workers.rem},
        "ms": {**last_stage, "Ms": result.last_stage.rem},
        "Mw": result.workers.rem,
        "Ms": result.last_stage.rem,
        "tori": result.workers.tori,
        "tideal": result.workers.tideal,
        "waste": result.waste,
        "worst_ranks": list(result.worst_ranks),
        "notes": list(result.notes),
    }


def advice(result: WhatIf) -> str:
    """Return the recommendation that follows from the figures, as a sentence."""
    if result.slowdown < STRAGGLING_FROM:
        return f"Stragglers cost less than {STRAGGLING_FROM - 1:.0%} of a step: nothing to do."
    if result.workers.rem >= MIN_PART_EXPLAINED:
        ranks = ranks_text(result.worst_ranks, 8)
        return f"A few workers explain most of the slowdown ({ranks}): check their hosts, or evict them."
    if result.last_stage.rem >= MIN_PART_EXPLAINED and result.has_stages:
        return (
            "The last stage explains most of the slowdown, because it also computes the loss: give it fewer layers "
            "with parallel.layers_per_chunk."
        )
    worst = next(iter(result.parts.by_optype.overall), "")
    if worst.endswith("-compute"):
        return (
            "The durations of computes differ, but neither by worker nor by stage: the cause is sequences of uneven "
            "length or pauses of the host; `megatrain diag stragglers` distinguishes them."
        )
    return f"Most of the slowdown is in {worst}: examine the network with `megatrain diag comm`."


def _part_figures(parts: Decomposition | None, attribute: str, is_overall: bool) -> dict[str, Any] | None:
    if parts is None:
        return None
    chosen: PartSlowdowns = getattr(parts, attribute)
    return dict(chosen.overall) if is_overall else {str(step): row for step, row in chosen.per_step.items()}


def _explained(part: Explained) -> dict[str, float]:
    return {name: getattr(part, name) for name in ("trem", "tadd", "tori", "tideal", "rem", "add")}


def _texts(figures: Mapping[int, float]) -> dict[str, float]:
    return {str(step): value for step, value in figures.items()}
