"""Lays out a timeline of ranks and steps: tracks of slices, flows from send to receive, and counters (MegaScale 5.1).

Each rank has a track for each lane (LANES); operations of different lanes may run at the same time. Viewers draw slices
of one track as a stack of calls, so slices of a track must nest; a slice that overlaps without nesting goes to a
further track of the same lane. Slices of communication are never nested, because a nested slice looks like a part of
the outer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.contracts.black_box.operations import MAX_OPERATIONS, Operation, StepValue
from megatrain.formatting import count_text
from megatrain_diagnostics.analysis.exchanges import Exchanges, end_ns, find_exchanges
from megatrain_diagnostics.analysis.step_windows import StepEvents
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.events.tables import NO_DURATION, Int64, Spans, Values, select

MAX_SLICES = 2_000_000
"""Limit for viewers in a browser, which have 2 GB of memory."""
LANES = ("compute", "tp", "pp-send", "pp-recv", "dp", "host", "data-loader", "pictures")
_NESTING = ("compute", "host")
_LANE_OF: dict[Operation, str] = {
    Operation.FORWARD_COMPUTE: "compute",
    Operation.BACKWARD_COMPUTE: "compute",
    Operation.BACKWARD_WEIGHT_COMPUTE: "compute",
    Operation.CLIP: "compute",
    Operation.OPTIMIZER: "compute",
    Operation.TP_ALL_GATHER: "tp",
    Operation.TP_REDUCE_SCATTER: "tp",
    Operation.TP_ALL_REDUCE: "tp",
    Operation.FORWARD_SEND: "pp-send",
    Operation.BACKWARD_SEND: "pp-send",
    Operation.FORWARD_RECV: "pp-recv",
    Operation.BACKWARD_RECV: "pp-recv",
    Operation.PP_ALL_REDUCE: "pp-recv",
    Operation.EMBEDDING_ALL_REDUCE: "pp-recv",
    Operation.PARAMS_ALL_GATHER: "dp",
    Operation.GRADS_REDUCE_SCATTER: "dp",
    Operation.DP_ALL_REDUCE: "dp",
    Operation.CP_ALL_REDUCE: "dp",
    Operation.UPDATES_ALL_TO_ALL: "dp",
    Operation.STEP: "host",
    Operation.DATA_WAIT: "host",
    Operation.GC: "host",
    Operation.CHECKPOINT: "host",
    Operation.CHECKPOINT_LOAD: "host",
    Operation.CHECKPOINT_EXCHANGE: "host",
    Operation.EVALUATION: "host",
    Operation.INIT: "host",
    Operation.BARRIER: "host",
    Operation.CHECKSUM: "host",
    Operation.DATA_READ: "data-loader",
    Operation.PICTURE_WAIT: "pictures",
    Operation.PICTURE_REQUESTS: "pictures",
}
"""Every operation has a row. An unknown operation, of a later version, is drawn on the lane of the host."""
_SENDS = (Operation.FORWARD_SEND.number, Operation.BACKWARD_SEND.number)


def lane_of(operation: Operation) -> str:
    """Return the lane that spans of an operation are drawn on."""
    return _LANE_OF[operation]


@dataclass(frozen=True, slots=True)
class Track:
    """One row of a rank. `number` is unique in the timeline."""

    number: int
    rank: int
    lane: str
    overflow: int
    """0: the first track of the lane; n: its n-th further track."""

    @property
    def name(self) -> str:
        return self.lane if not self.overflow else f"{self.lane} ({self.overflow + 1})"


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The laid-out timeline. Slices are rows of `spans`, sorted by rank and begin."""

    roster: Roster
    spans: Spans
    begin_ns: Int64
    """Start of each span, relative to `base_ns`."""
    length_ns: Int64
    """Length of each span in ns, at least 1; an open span lasts to the end of the timeline."""
    track_of: Int64
    """Index in `tracks` of each span."""
    tracks: tuple[Track, ...]
    flows: Int64
    """Shape: [flows, 2]. The rows of a send and its receive."""
    values: Values
    base_ns: int
    """Unix ns by the daemon's clock."""
    left_out: tuple[str, ...]
    """A sentence for each part that was left out because of the limit of slices."""
    notes: tuple[str, ...]

    @property
    def num_slices(self) -> int:
        return len(self.spans.rank)


def lay_out(events: StepEvents, values: Values, first_step: int, last_step: int, max_slices: int) -> Timeline:
    """Return the timeline of `first_step` to `last_step`, inclusive. `values`: of the same steps, for counters."""
    spans = select(events.spans, (events.spans.step >= first_step) & (events.spans.step <= last_step))
    spans, left_out = _within(spans, max_slices)
    last_ns = int(end_ns(spans).max()) if len(spans.rank) else 0
    is_open = spans.duration_ns == NO_DURATION
    length = np.maximum(np.where(is_open, last_ns - spans.start_ns, spans.duration_ns), 1)
    order = np.lexsort((-length, spans.start_ns, spans.rank))
    spans, length = select(spans, order), length[order]
    exchanges = find_exchanges(spans, events.roster)
    finite = select(values, np.isfinite(values.value) & np.isin(values.rank, np.unique(spans.rank)))
    starts = [int(array.min()) for array in (spans.start_ns, finite.at_ns) if len(array)]
    base_ns = min(starts, default=0)
    begin = spans.start_ns - base_ns
    tracks, track_of = _tracks(spans, begin, length)
    notes = list(events.notes)
    if is_open.any():
        notes.append(f"{count_text(int(is_open.sum()), 'slice')} without an end, drawn to the end of the timeline")
    if len(finite.value) < len(values.value):
        num_left_out = count_text(len(values.value) - len(finite.value), "value")
        notes.append(f"left out {num_left_out}: not finite, or of ranks that are not drawn")
    notes += exchanges.problems()
    return Timeline(
        roster=events.roster,
        spans=spans,
        begin_ns=begin,
        length_ns=length,
        track_of=track_of,
        tracks=tracks,
        flows=_flows(spans, exchanges),
        values=finite,
        base_ns=base_ns,
        left_out=left_out,
        notes=tuple(notes),
    )


def _within(spans: Spans, max_slices: int) -> tuple[Spans, tuple[str, ...]]:
    """Return the spans within the limit: the first complete steps; if even the first does not fit, its first ranks."""
    if len(spans.rank) <= max_slices:
        return spans, ()
    steps, counts = np.unique(spans.step, return_counts=True)
    num_fitting = int(np.searchsorted(np.cumsum(counts), max_slices, side="right"))
    if num_fitting:
        last = steps[num_fitting - 1]
        kept = select(spans, spans.step <= last)
        dropped = len(spans.rank) - len(kept.rank)
        text = f"steps {steps[num_fitting]} to {steps[-1]} with {dropped} slices: at most {max_slices} are drawn"
        return kept, (text,)
    first = select(spans, spans.step == steps[0])
    ranks, of_rank = np.unique(first.rank, return_counts=True)
    num_ranks = int(np.searchsorted(np.cumsum(of_rank), max_slices, side="right"))
    kept = select(first, np.isin(first.rank, ranks[:num_ranks]))
    dropped = len(spans.rank) - len(kept.rank)
    drawn = f"{count_text(num_ranks, 'rank')} of step {steps[0]}"
    text = f"everything except {drawn}, {dropped} slices: at most {max_slices} are drawn"
    return kept, (text,)


def _tracks(spans: Spans, begin: Int64, length: Int64) -> tuple[tuple[Track, ...], Int64]:
    """Assign each slice to a track. Slices must be sorted by rank, begin and descending length."""
    lane_of = np.full(MAX_OPERATIONS, LANES.index("host"), dtype=np.int64)
    for operation, lane in _LANE_OF.items():
        lane_of[operation.number] = LANES.index(lane)
    lanes = lane_of[np.minimum(spans.operation, MAX_OPERATIONS - 1)]
    key = spans.rank.astype(np.int64) * len(LANES) + lanes
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    tracks: list[Track] = []
    track_of = np.zeros(len(key), dtype=np.int64)
    last = [*first[1:].tolist(), len(order)]
    for track_key, begin_at, end_at in zip(keys.tolist(), first.tolist(), last if len(first) else [], strict=True):
        rows = order[begin_at:end_at]
        rank, lane = track_key // len(LANES), LANES[track_key % len(LANES)]
        begins, lengths = begin[rows].tolist(), length[rows].tolist()
        places = _places(zip(begins, lengths, strict=True), may_nest=lane in _NESTING)
        track_of[rows] = len(tracks) + np.array(places, dtype=np.int64)
        # track 0 is the idle thread in some viewers
        tracks += [Track(len(tracks) + 1 + more, rank, lane, more) for more in range(max(places) + 1)]
    return tuple(tracks), track_of


def _places(slices: Iterable[tuple[int, int]], *, may_nest: bool) -> list[int]:
    """Return for each slice the first track of its lane in which it fits."""
    open_ends: list[list[int]] = []
    places: list[int] = []
    for begin, length in slices:
        end = begin + length
        for place, stack in enumerate(open_ends):
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack or (may_nest and end <= stack[-1]):
                stack.append(end)
                places.append(place)
                break
        else:
            open_ends.append([end])
            places.append(len(open_ends) - 1)
    return places


def _flows(spans: Spans, exchanges: Exchanges) -> Int64:
    """Return the rows of each send and its receive, if both are drawn."""
    pairs = np.flatnonzero(np.isin(exchanges.operation, _SENDS) & (exchanges.num_parts == 2))
    first = exchanges.first[pairs]
    ends = np.stack([exchanges.parts[first], exchanges.parts[first + 1]], axis=1) if len(pairs) else np.zeros((0, 2))
    ends = ends.astype(np.int64)
    is_reversed = ~np.isin(spans.operation[ends[:, 0]], _SENDS)
    ends[is_reversed] = ends[is_reversed][:, ::-1]
    return ends


def rank_name(roster: Roster, rank: int) -> str:
    """Return "rank 00777 pp=5 dp=3 tp=1 host-2": padded, so that sorting by name sorts by rank."""
    place = " ".join(f"{axis}={index}" for axis, index in roster.coordinate(rank).items())
    width = max(2, len(str(roster.layout.world_size - 1)))
    return f"rank {rank:0{width}d} {place} {roster.host_of(rank)}".rstrip()


def counter_names(values: Values) -> Sequence[str]:
    """Return the name of each value's counter."""
    names = {kind.value: kind.text for kind in StepValue}
    return [names.get(kind, f"value-{kind}") for kind in values.kind.tolist()]
