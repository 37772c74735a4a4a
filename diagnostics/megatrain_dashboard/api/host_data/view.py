"""The document of a host's data, from the stored rows of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation, StepValue
from megatrain.contracts.log_messages import REPLACED_SAMPLES
from megatrain_dashboard.api.host_data.cells import cells_of, history_of, mean_of, over_ranks
from megatrain_dashboard.api.host_data.document import (
    DataCacheDocument,
    DataLoaderDocument,
    HostDataDocument,
    RankDataDocument,
    ReplacedSampleDocument,
    nothing_recorded,
)
from megatrain_dashboard.api.host_data.producers_view import pictures_document
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import Float64, Int64, LogLines, StepTotals, Values, select

_MAX_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class HostRows:
    """The stored rows of the ranks of a host in `steps`, which ascend. lines: those that report replaced samples."""

    steps: Int64
    totals: StepTotals
    values: Values
    lines: LogLines


@dataclass(frozen=True, slots=True)
class ConfiguredData:
    """What the configuration has about data. prefetch: None if it is not known. addresses: of producers of pictures."""

    prefetch: int | None = None
    addresses: Sequence[str] = ()


def configured_data(config: Config) -> ConfiguredData:
    """Return what a configuration has about data."""
    return ConfiguredData(config.data.prefetch, tuple(map(str, config.pictures.peers)))


def host_data_document(host: str, roster: Roster, rows: HostRows, configured: ConfiguredData) -> HostDataDocument:
    """Return the document of a host."""
    totals, values, steps = rows.totals, rows.values, rows.steps
    ranks = np.array(roster.ranks_on(host), dtype=np.int64)
    if not len(ranks) or not len(steps):
        return nothing_recorded(host)

    def seconds(operation: Operation) -> Float64:
        of_it = select(totals, totals.operation == operation.number)
        return cells_of(ranks, steps, of_it, of_it.sum_ns / 1e9)

    wait_s, step_s = seconds(Operation.DATA_WAIT), mean_of(seconds(Operation.STEP))
    of_kind = select(values, values.kind == StepValue.STEPS_READY)
    ready = cells_of(ranks, steps, of_kind, of_kind.value)
    has_loader = bool(np.isfinite(ready).any())
    return HostDataDocument(
        host=host,
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        step_s=step_s,
        loader=_loader(roster, totals, values, steps, ready, ranks, configured.prefetch) if has_loader else None,
        cache=_cache(ranks, steps, values),
        pictures=pictures_document(
            values,
            steps,
            seconds(Operation.PICTURE_WAIT),
            None if step_s is None else step_s + (mean_of(wait_s) or 0.0),
            configured.addresses,
        ),
        replaced_samples=_replaced(rows.lines),
        ranks=tuple(
            _rank(int(rank), wait_s[place], ready[place] if has_loader else None, steps)
            for place, rank in enumerate(ranks)
        ),
    )


def _rank(rank: int, wait_s: Float64, ready: Float64 | None, steps: Int64) -> RankDataDocument:
    longest = int(np.nanargmax(wait_s)) if np.isfinite(wait_s).any() else None
    return RankDataDocument(
        rank=rank,
        wait_s=mean_of(wait_s),
        longest_wait_s=None if longest is None else float(wait_s[longest]),
        longest_wait_step=None if longest is None else int(steps[longest]),
        num_not_ready=None if ready is None else int((ready == 0).sum()),
        wait_history=history_of(wait_s, np.max),
    )


def _loader(
    roster: Roster,
    totals: StepTotals,
    values: Values,
    steps: Int64,
    ready: Float64,
    ranks: Int64,
    prefetch: int | None,
) -> DataLoaderDocument:
    reads = select(totals, totals.operation == Operation.DATA_READ.number)
    read_s = cells_of(ranks, steps, reads, reads.sum_ns / 1e9)
    num_bytes = cells_of(ranks, steps, reads, reads.num_bytes.astype(np.float64))
    starts = values.value[values.kind == StepValue.LOADER_STARTS]
    # a step in which the loader has read nothing counts as 0 seconds
    read_by_step = np.nansum(read_s, axis=0)
    fewest = over_ranks(ready)
    known = fewest[np.isfinite(fewest)]
    return DataLoaderDocument(
        replicas=tuple(sorted({roster.layout.sample_share(rank)[0] for rank in set(reads.rank.tolist())})),
        num_bytes=float(np.nansum(num_bytes) / len(steps)) if len(reads.rank) else None,
        read_s=float(read_by_step.mean()) if len(reads.rank) else None,
        longest_read_s=float(read_by_step.max()) if len(reads.rank) else None,
        num_ready=int(known[-1]) if len(known) else None,
        least_ready=int(known.min()) if len(known) else None,
        most_ready=prefetch,
        num_starts=int(starts.max()) if len(starts) else None,
        ready_history=history_of(fewest, np.min),
    )


def _replaced(lines: LogLines) -> tuple[ReplacedSampleDocument, ...]:
    """Return the samples that lines in order of time report, the newest first."""
    return tuple(
        ReplacedSampleDocument(
            rank=int(lines.rank[row]),
            at_unix_s=int(lines.at_ns[row]) / 1e9,
            text=str(lines.line[row]).partition(REPLACED_SAMPLES)[2].strip()[:_MAX_CHARACTERS],
        )
        for row in reversed(range(len(lines.rank)))
    )


def _cache(ranks: Int64, steps: Int64, values: Values) -> DataCacheDocument | None:
    """Return the use of the cache in these steps; None if no rank has recorded any."""

    def sums(kind: StepValue) -> Float64:
        of_kind = select(values, values.kind == kind)
        found = cells_of(ranks, steps, of_kind, of_kind.value)
        return found[np.isfinite(found).any(axis=1)]

    def mean_growth(kind: StepValue) -> float | None:
        found = sums(kind)
        return float((np.nanmax(found, axis=1) - np.nanmin(found, axis=1)).sum() / num_steps) if num_steps else None

    num_steps, not_stored = int(steps[-1] - steps[0]), sums(StepValue.CACHE_NOT_STORED)
    if not len(not_stored):
        return None
    return DataCacheDocument(
        hit_bytes=mean_growth(StepValue.CACHE_HIT_BYTES),
        fetched_bytes=mean_growth(StepValue.CACHE_FETCHED_BYTES),
        evicted_bytes=mean_growth(StepValue.CACHE_EVICTED_BYTES),
        num_not_stored=int(np.nanmax(not_stored, axis=1).sum()),
    )
