"""The timeline as the page draws it: slices on lines, arrows from send to receive, and the start of steps.

A line is a track and a depth within it. Slices of one line never overlap and are sorted by time, so the page finds the
visible ones by binary search. Times are ns from a base; 2^53 ns are a hundred days.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import RecordFlag
from megatrain.contracts.layout import STAGES, Layout
from megatrain_dashboard.api.timeline.document import FullStepDocument, TimelineStepsDocument
from megatrain_dashboard.responses.binary import pack
from megatrain_dashboard.responses.document import layout_document
from megatrain_diagnostics.analysis.ideal_timeline import IdealTimes
from megatrain_diagnostics.analysis.timeline import LANES, Timeline
from megatrain_diagnostics.events.tables import NO_DURATION, Int64, Spans
from megatrain_diagnostics.store.full_steps import FullStep

IS_OPEN, HAS_FAILED, IS_DEVICE_CLOCK = 1, 2, 4
"""Bits of a slice's `flags`."""
NO_CHUNK = 255
MAX_DEFAULT_RANKS = 32
NO_IDEAL = -1.0


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Slices by line. `order`: the timeline's row of each slice that is sent. `first` [lines + 1]: indexes `order`."""

    order: Int64
    first: Int64
    track: Int64
    depth: Int64


def default_ranks(layout: Layout, around: int | None = None) -> tuple[int, ...]:
    """Return the ranks that are drawn by default: all of a small job, else the pipeline of a rank and its neighbors.

    The pipeline has priority, since its ranks wait for one another; then come the ranks of its tensor-parallel groups.
    """
    if layout.world_size <= MAX_DEFAULT_RANKS:
        return tuple(range(layout.world_size))
    center = 0 if around is None else around
    chosen = list(dict.fromkeys([center, *layout.ranks_along(center, STAGES)]))[:MAX_DEFAULT_RANKS]
    for rank in layout.ranks_along(center, STAGES):
        group = [member for member in layout.ranks_along(rank, "tp") if member not in chosen]
        if len(chosen) + len(group) <= MAX_DEFAULT_RANKS:
            chosen += group
    return tuple(sorted(chosen))


def lines_of(timeline: Timeline) -> Lines:
    """Return the lines: a slice that lies within another slice of its track is one line below it."""
    begin, length = timeline.begin_ns, timeline.length_ns
    by_track = np.lexsort((-length, begin, timeline.track_of))
    depth = np.zeros(len(by_track), dtype=np.int64)
    ends: list[int] = []
    track = -1
    for place, (slice_track, at, takes) in enumerate(
        zip(timeline.track_of[by_track].tolist(), begin[by_track].tolist(), length[by_track].tolist(), strict=True)
    ):
        if slice_track != track:
            track, ends = slice_track, []
        while ends and ends[-1] <= at:
            ends.pop()
        depth[place] = len(ends)
        ends.append(at + takes)
    deepest = int(depth.max(initial=0)) + 1
    key = timeline.track_of[by_track] * deepest + depth
    stable = np.argsort(key, kind="stable")
    keys, first = np.unique(key[stable], return_index=True)
    return Lines(
        order=by_track[stable],
        first=np.append(first, len(stable)).astype(np.int64),
        track=keys // deepest,
        depth=keys % deepest,
    )


def timeline_picture(timeline: Timeline, first_step: int, last_step: int, ranks: Sequence[int]) -> bytes:
    """Return the timeline as a container of arrays."""
    roster, spans = timeline.roster, timeline.spans
    lines = lines_of(timeline)
    order = lines.order
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    shown = sorted({track.rank for track in timeline.tracks})
    hosts = {name: number for number, name in enumerate(dict.fromkeys(roster.host_of(rank) for rank in shown))}
    steps, step_begin, step_end = _steps(timeline)
    fields: dict[str, Any] = {
        "round": roster.round,
        "layout": layout_document(roster.layout).model_dump(),
        "first_step": first_step,
        "last_step": last_step,
        "ranks_asked": list(ranks),
        "base_unix_ns": str(timeline.base_ns),  # as text: a page has no integers of 64 bits
        "end_ns": int((timeline.begin_ns + timeline.length_ns).max(initial=0)),
        "lanes": list(LANES),
        "operations": {str(operation.number): operation.value for operation in Operation},
        "hosts": list(hosts),
        "left_out": list(timeline.left_out),
        "notes": list(timeline.notes),
    }  # fmt: skip
    arrays: dict[str, NDArray[Any]] = {
        "begin": timeline.begin_ns[order].astype(np.float64),
        "length": timeline.length_ns[order].astype(np.float64),
        "sequence": spans.sequence[order].astype(np.float64),
        "bytes": spans.num_bytes[order].astype(np.float64),
        "step": spans.step[order].astype(np.int32),
        "microbatch": spans.microbatch[order].astype(np.int32),
        "operation": spans.operation[order].astype(np.uint8),
        "chunk": np.where(spans.chunk[order] < 0, NO_CHUNK, spans.chunk[order]).astype(np.uint8),
        "flags": _flags(spans)[order],
        "line_first": lines.first.astype(np.int32),
        "line_track": lines.track.astype(np.int32),
        "line_depth": lines.depth.astype(np.int32),
        "track_rank": np.array([track.rank for track in timeline.tracks], dtype=np.int32),
        "track_lane": np.array([LANES.index(track.lane) for track in timeline.tracks], dtype=np.uint8),
        "track_overflow": np.array([track.overflow for track in timeline.tracks], dtype=np.int32),
        "rank": np.array(shown, dtype=np.int32),
        "rank_host": np.array([hosts[roster.host_of(rank)] for rank in shown], dtype=np.int32),
        "flows": place[timeline.flows].astype(np.int32).reshape(-1, 2),
        "steps": steps.astype(np.int32),
        "step_begin": step_begin.astype(np.float64),
        "step_end": step_end.astype(np.float64),
    }
    return pack(fields, arrays)


def ideal_picture(timeline: Timeline, ideal: IdealTimes | None, problem: str) -> bytes:
    """Return the times that the same slices would have without stragglers, in the same order.

    `ideal` None: it is not known, and `problem` has the reason.
    """
    order = lines_of(timeline).order
    count = len(order)
    if ideal is None:
        nothing = np.zeros(0)
        fields: dict[str, Any] = {"problem": problem, "ideal_s": None, "notes": []}
        steps, replayed = nothing.astype(np.int32), nothing
        begin, length, critical = np.zeros(count), np.full(count, NO_IDEAL), np.zeros(count, dtype=np.uint8)
    else:
        fields = {"problem": "", "ideal_s": ideal.ideal_s, "notes": list(ideal.notes)}
        steps, replayed = ideal.steps.astype(np.int32), ideal.replayed_s
        begin = np.where(ideal.length_ns >= 0, ideal.begin_ns - timeline.base_ns, 0)[order].astype(np.float64)
        length = ideal.length_ns[order].astype(np.float64)
        critical = ideal.is_critical[order].astype(np.uint8)
    arrays = {"begin": begin, "length": length, "is_critical": critical, "steps": steps, "replayed_s": replayed}
    return pack(fields, arrays)


def steps_document(round_number: int, steps: Sequence[FullStep]) -> TimelineStepsDocument:
    """Return the document of the steps that can be drawn."""
    return TimelineStepsDocument(
        round=round_number,
        steps=tuple(
            FullStepDocument(
                step=step.step,
                num_ranks=step.num_ranks,
                began_unix_s=step.begin_ns / 1e9,
                duration_s=max(0.0, (step.end_ns - step.begin_ns) / 1e9),
            )
            for step in steps
        ),
    )


def _flags(spans: Spans) -> NDArray[np.uint8]:
    flags = np.zeros(len(spans.rank), dtype=np.uint8)
    flags[spans.duration_ns == NO_DURATION] |= IS_OPEN
    flags[(spans.flags & RecordFlag.FAILED) != 0] |= HAS_FAILED
    flags[(spans.flags & RecordFlag.DEVICE_CLOCK) != 0] |= IS_DEVICE_CLOCK
    return flags


def _steps(timeline: Timeline) -> tuple[Int64, Int64, Int64]:
    """Return the steps, and for each the start of its first slice and the end of its last one."""
    steps, of_slice = np.unique(timeline.spans.step, return_inverse=True)
    begin = np.full(len(steps), np.iinfo(np.int64).max)
    end = np.zeros(len(steps), dtype=np.int64)
    np.minimum.at(begin, of_slice, timeline.begin_ns)
    np.maximum.at(end, of_slice, timeline.begin_ns + timeline.length_ns)
    return steps.astype(np.int64), begin, end
