"""GET /compare: jobs of this server side by side: their metrics over the same steps, and keys whose values differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from megatrain.config.serialize import config_values
from megatrain.formatting import printable
from megatrain.run_files.run_directory import RunDirectory
from megatrain_dashboard.parts import JobsParts
from megatrain_dashboard.responses.document import Document
from megatrain_dashboard.responses.errors import bad_query, not_found, shown
from megatrain_dashboard.responses.query_parameters import Step, check_steps
from megatrain_dashboard.sources.run_files import read_config
from megatrain_dashboard.sources.runs.job_seen import JobSeen, time_of
from megatrain_dashboard.sources.runs.metrics_history import (
    EMPTY,
    NEWEST_STEPS,
    MetricsHistory,
    binned,
    newest_median,
    read_metrics_history,
)
from megatrain_dashboard.sources.runs.run_summary import signature_of
from megatrain_diagnostics.events.tables import Float64

Numbers = tuple[float | None, ...]
HISTORY_BYTES = 8 * 2**20
"""Bytes that are read from the metrics of each run: about twenty thousand steps without gaps."""
_MIN_RUNS, _MAX_RUNS = 2, 4
"""Number of runs. One run has its own page; the lines of more than four are hard to distinguish."""


class ComparedRun(Document):
    """One of the runs. The lists have an entry for each `step` of the document; null: the run has no value there."""

    name: str
    job: str
    first_step: int | None
    """The first step that is shown."""
    last_step: int | None
    """The last step of the whole run."""
    loss: tuple[float | None, ...]
    step_s: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]
    mfu: tuple[float | None, ...]
    common_loss: float | None
    """The median loss of the newest twenty steps up to `common_step`."""
    median_step_s: float | None
    """This and the next two are medians over all steps that are shown."""
    median_tokens_per_s: float | None
    median_mfu: float | None
    num_ranks: int | None
    num_incidents: int
    effective_time_ratio: float | None
    training_s: float | None
    is_sampled: bool
    """Whether only evenly spread parts of the metrics were read because there are too many."""
    problems: tuple[str, ...]
    """The parts of the run that could not be read."""


class ConfigDifference(Document):
    """A key in which the runs differ."""

    key: str
    """section.key"""
    values: tuple[str | None, ...]
    """The value of each run as TOML, defaults included; null: the configuration is not known, or lacks the key."""


class CompareDocument(Document):
    """The response of /compare. An entry represents `stride` steps: the median of their measured values."""

    at_unix_s: float
    stride: int
    step: tuple[int, ...]
    """The last step of each entry."""
    common_step: int | None
    """The newest step that all of the runs have done."""
    runs: tuple[ComparedRun, ...]
    differences: tuple[ConfigDifference, ...]
    num_same: int
    """The number of keys that have the same value in all runs."""


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
    shown = [_between(run.history, first, last) for run in runs]
    reached = [run.history.last_step for run in runs]
    common = min(reached) if reached and None not in reached else None  # type: ignore[type-var]
    steps, stride = _axis(shown, points)
    differing, num_same = differences([run.values for run in runs])
    return CompareDocument(
        at_unix_s=now_s,
        stride=stride,
        step=steps,
        common_step=common,
        runs=tuple(_run(run, part, steps, stride, common) for run, part in zip(runs, shown, strict=True)),
        differences=differing,
        num_same=num_same,
    )


def differences(configs: Sequence[Mapping[str, str] | None]) -> tuple[tuple[ConfigDifference, ...], int]:
    """Return the keys whose values differ among the known configurations, and the number of keys with one value.

    The keys have the order of the configurations. With fewer than two known configurations, there are no keys.
    """
    known = [config for config in configs if config is not None]
    keys = list(dict.fromkeys(key for config in known for key in config)) if len(known) > 1 else []
    differing = tuple(
        ConfigDifference(key=key, values=tuple(None if config is None else config.get(key) for config in configs))
        for key in keys
        if len({config.get(key) for config in known}) > 1
    )
    return differing, len(keys) - len(differing)


def _between(history: MetricsHistory, first: int | None, last: int | None) -> MetricsHistory:
    steps = history.column("step")
    chosen = (steps >= (0 if first is None else first)) & (steps <= (np.inf if last is None else last))
    return MetricsHistory(history.table[:, chosen], history.mfu_per_rate, history.restarts, history.is_sampled)


def _axis(histories: Sequence[MetricsHistory], points: int) -> tuple[tuple[int, ...], int]:
    """Return the last step of each entry, and the number of steps that an entry stands for."""
    known = [history.column("step") for history in histories if len(history)]
    if not known:
        return (), 1
    begin, end = int(min(steps[0] for steps in known)), int(max(steps[-1] for steps in known))
    stride = max(1, -(-(end - begin + 1) // points))
    return tuple(min(end, at + stride - 1) for at in range(begin, end + 1, stride)), stride


def _run(
    inputs: RunInputs, shown: MetricsHistory, steps: tuple[int, ...], stride: int, common: int | None
) -> ComparedRun:
    bins = (shown.column("step") - (steps[0] - stride + 1 if steps else 0)) // stride
    until_common = inputs.history.column("step") <= (-1 if common is None else common)
    ranks = newest_median(shown.column("num_ranks"), 1)

    def line(values: Float64) -> Numbers:
        found = binned(values, bins, len(steps))
        return tuple(value if known else None for value, known in zip(found.tolist(), np.isfinite(found), strict=True))

    return ComparedRun.of(
        inputs,
        first_step=int(shown.column("step")[0]) if len(shown) else None,
        last_step=inputs.history.last_step,
        loss=line(shown.column("loss")),
        step_s=line(shown.column("step_s")),
        tokens_per_s=line(shown.tokens_per_s),
        mfu=line(shown.mfu),
        common_loss=newest_median(inputs.history.column("loss")[until_common], NEWEST_STEPS),
        median_step_s=newest_median(shown.column("step_s"), len(shown)),
        median_tokens_per_s=newest_median(shown.tokens_per_s, len(shown)),
        median_mfu=newest_median(shown.mfu, len(shown)),
        num_ranks=None if ranks is None else int(ranks),
        is_sampled=inputs.history.is_sampled,
    )


def router(parts: JobsParts) -> APIRouter:
    """Return the route that answers with the charts and configurations of some jobs side by side."""
    routes = APIRouter(tags=["jobs"])

    @routes.get("/compare", response_model=CompareDocument, dependencies=[parts.heavy_query])
    def compare(
        request: Request,
        jobs: Annotated[str, Query(max_length=2000)],
        first: Step = None,
        last: Step = None,
        points: Annotated[int, Query(ge=2, le=2000)] = 400,
    ) -> Response:
        """Return the runs of two to four jobs, whose names are separated by commas."""
        check_steps(first, last)
        seen = _named(parts, jobs)

        def make() -> CompareDocument:
            runs = [_inputs(job, parts.clock()) for job in seen]
            return compare_document(runs, parts.clock(), first=first, last=last, points=points)

        changes = tuple(job.summary and signature_of(job.summary.root) for job in seen)
        key = ("compare", tuple(job.name for job in seen), changes, first, last, points)
        return parts.responses.answer(request, key, make)

    return routes


def _named(parts: JobsParts, text: str) -> list[JobSeen]:
    """Return the jobs that a request names. Raises: RefusalError."""
    names = list(dict.fromkeys(part for part in text.split(",") if part))
    if not _MIN_RUNS <= len(names) <= _MAX_RUNS:
        raise bad_query("jobs", text, f"expected {_MIN_RUNS} to {_MAX_RUNS} names of jobs, separated by commas")
    known = parts.catalog.last_poll().jobs
    for name in names:
        if name not in known:
            raise not_found(f"jobs={shown(name)}: no such job; api/v1/jobs lists the jobs")
    return [known[name] for name in names]


def _inputs(seen: JobSeen, now_s: float) -> RunInputs:
    """Read the data of a job that is compared, and report what cannot be read."""
    summary = seen.summary
    if summary is None:
        return RunInputs(seen.name, seen.name, EMPTY, None, problems=("its run directory is not on this machine",))
    run, problems, history = RunDirectory(summary.root), [], EMPTY
    config, problem = read_config(run)
    problems.append(problem or ("" if config is not None else "config.toml is missing"))
    try:
        history = read_metrics_history(run, HISTORY_BYTES)
    except OSError as error:
        problems.append(f"metrics/metrics.jsonl {error.strerror}")
    spent = time_of(seen, now_s)
    return RunInputs(
        name=seen.name,
        job=summary.job,
        history=history,
        values=None if config is None else config_values(config),
        num_incidents=summary.num_incidents,
        effective_time_ratio=spent.ratio,
        training_s=spent.training_s,
        problems=tuple(printable(text) for text in problems if text),
    )
