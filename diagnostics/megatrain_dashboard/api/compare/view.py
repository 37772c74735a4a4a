"""Make the document of /compare: metrics of runs over common steps, and the differences of configurations. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatrain_dashboard.api.compare.document import CompareDocument, ComparedRun, ConfigDifference
from megatrain_dashboard.sources.runs.metrics_history import (
    NEWEST_STEPS,
    MetricsHistory,
    binned,
    newest_median,
)
from megatrain_diagnostics.events.tables import Float64

Numbers = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The data of one run. `values`: section.key -> value as text, for every key; None: not known."""

    name: str
    job: str
    history: MetricsHistory
    values: Mapping[str, str] | None
    num_incidents: int = 0
    effective_time_ratio: float | None = None
    training_s: float | None = None
    problems: tuple[str, ...] = ()


def compare_document(
    runs: Sequence[RunInputs], now_s: float, *, first: int | None, last: int | None, points: int
) -> CompareDocument:
    """Return the runs over the steps from `first` to `last`, at most `points` entries; None: no bound."""
    shown = [_between(one.history, first, last) for one in runs]
    reached = [one.history.last_step for one in runs]
    common = min(reached) if reached and None not in reached else None  # type: ignore[type-var]
    steps, stride = _axis(shown, points)
    return CompareDocument(
        at_unix_s=now_s,
        stride=stride,
        step=steps,
        common_step=common,
        runs=tuple(_run(one, part, steps, stride, common) for one, part in zip(runs, shown, strict=True)),
        differences=differences([one.values for one in runs]),
        num_same=_num_same([one.values for one in runs]),
    )


def differences(configs: Sequence[Mapping[str, str] | None]) -> tuple[ConfigDifference, ...]:
    """Return the keys whose values differ among the known configurations, in the order of the configurations."""
    known = [one for one in configs if one is not None]
    keys = list(dict.fromkeys(key for one in known for key in one))
    return tuple(
        ConfigDifference(key=key, values=tuple(None if one is None else one.get(key) for one in configs))
        for key in keys
        if len({one.get(key) for one in known}) > 1
    )


def _num_same(configs: Sequence[Mapping[str, str] | None]) -> int:
    known = [one for one in configs if one is not None]
    keys = {key for one in known for key in one}
    return sum(len({one.get(key) for one in known}) == 1 for key in keys) if len(known) > 1 else 0


def _between(history: MetricsHistory, first: int | None, last: int | None) -> MetricsHistory:
    steps = history.column("step")
    chosen = (steps >= (0 if first is None else first)) & (steps <= (np.inf if last is None else last))
    return MetricsHistory(history.table[:, chosen], history.mfu_per_rate, history.restarts, history.is_sampled)


def _axis(histories: Sequence[MetricsHistory], points: int) -> tuple[tuple[int, ...], int]:
    """Return the last step of each entry, and the number of steps that an entry stands for."""
    known = [one.column("step") for one in histories if len(one)]
    if not known:
        return (), 1
    begin, end = int(min(steps[0] for steps in known)), int(max(steps[-1] for steps in known))
    stride = max(1, -(-(end - begin + 1) // points))
    return tuple(min(end, at + stride - 1) for at in range(begin, end + 1, stride)), stride


def _run(one: RunInputs, shown: MetricsHistory, steps: tuple[int, ...], stride: int, common: int | None) -> ComparedRun:
    bins = (shown.column("step") - (steps[0] - stride + 1 if steps else 0)) // stride
    until_common = one.history.column("step") <= (-1 if common is None else common)
    ranks = newest_median(shown.column("num_ranks"), 1)

    def line(values: Float64) -> Numbers:
        found = binned(values, bins, len(steps))
        return tuple(value if known else None for value, known in zip(found.tolist(), np.isfinite(found), strict=True))

    return ComparedRun(
        name=one.name,
        job=one.job,
        first_step=int(shown.column("step")[0]) if len(shown) else None,
        last_step=one.history.last_step,
        loss=line(shown.column("loss")),
        step_s=line(shown.column("step_s")),
        tokens_per_s=line(shown.tokens_per_s),
        mfu=line(shown.mfu),
        common_loss=newest_median(one.history.column("loss")[until_common], NEWEST_STEPS),
        median_step_s=newest_median(shown.column("step_s"), len(shown)),
        median_tokens_per_s=newest_median(shown.tokens_per_s, len(shown)),
        median_mfu=newest_median(shown.mfu, len(shown)),
        num_ranks=None if ranks is None else int(ranks),
        num_incidents=one.num_incidents,
        effective_time_ratio=one.effective_time_ratio,
        training_s=one.training_s,
        is_sampled=one.history.is_sampled,
        problems=one.problems,
    )
