"""Converts a timeline to Chrome's JSON trace format, which Perfetto and chrome://tracing can open.

Times are microseconds with three decimals, exact to the ns. A base time is subtracted, because a double
resolves unix times only to a quarter of a microsecond; `otherData` has the base. The trace has complete events (X),
flows from a send (s) to its receive (f, bound to the enclosing slice), counters (C), users' notes (i), and metadata
(M). It is generated in pieces, because it may be large.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from megatrain.contracts.black_box.operations import MAX_OPERATIONS, operation_name
from megatrain.contracts.black_box.values import RecordFlag
from megatrain.contracts.layout import STAGES
from megatrain.formatting import printable
from megatrain_diagnostics.analysis.timeline import LANES, Timeline, counter_names, rank_name
from megatrain_diagnostics.events.tables import NO_DURATION
from megatrain_job.jobs.notes import Note

_PIECE = 10_000
_FLOW_NAME = "pipeline"


def chrome_trace(timeline: Timeline, notes: Iterable[Note] = ()) -> Iterator[str]:
    """Yield the text of the file in pieces. Users' `notes` within the time of the timeline become instant events."""
    yield '{"displayTimeUnit":"ns","otherData":' + json.dumps(_other_data(timeline)) + ',"traceEvents":[\n'
    # metadata comes first and is never empty, so a comma can precede every later event
    yield ",\n".join(_encoded(event) for event in (*_metadata(timeline), *_marks(timeline, notes)))
    pending: list[str] = []
    for line in _lines(timeline):
        pending.append(line)
        if len(pending) == _PIECE:
            yield ",\n" + ",\n".join(pending)
            pending.clear()
    if pending:
        yield ",\n" + ",\n".join(pending)
    yield "\n]}\n"


def _other_data(timeline: Timeline) -> dict[str, Any]:
    return {
        # as text, because JavaScript has no 64-bit integers
        "base_unix_ns": str(timeline.base_ns),
        "round": timeline.roster.round,
        "layout": str(timeline.roster.layout),
        "num_slices": timeline.num_slices,
        "num_flows": len(timeline.flows),
        "left_out": list(timeline.left_out),
        "notes": list(timeline.notes),
    }


def _metadata(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "trace_name", "pid": 0, "tid": 0, "args": {"name": "megatrain"}}
    for rank in dict.fromkeys(track.rank for track in timeline.tracks):
        at = timeline.roster.coordinate(rank)
        name = printable(rank_name(timeline.roster, rank))
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_labels", "pid": rank, "args": {"labels": f"stage {at[STAGES]}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for track in timeline.tracks:
        of_track = {"ph": "M", "pid": track.rank, "tid": track.number}
        place = LANES.index(track.lane) * 100 + track.overflow
        yield {**of_track, "name": "thread_name", "args": {"name": track.name}}
        yield {**of_track, "name": "thread_sort_index", "args": {"sort_index": place}}


def _marks(timeline: Timeline, notes: Iterable[Note]) -> Iterator[dict[str, Any]]:
    """Yield an instant event for each note that is not retracted; a note on a step is at the start of that step."""
    if not timeline.num_slices:
        return
    end_ns = int((timeline.begin_ns + timeline.length_ns).max())
    for note in notes:
        of_step = timeline.spans.step == note.step
        at_ns: int | None = None
        if note.at_unix_s is not None:
            at_ns = round(note.at_unix_s * 1e9) - timeline.base_ns
        elif of_step.any():
            at_ns = int(timeline.begin_ns[of_step].min())
        if at_ns is not None and 0 <= at_ns <= end_ns and not note.is_retracted:
            name = printable(f"{note.user}: {note.text}")
            yield {"ph": "i", "s": "g", "cat": "note", "name": name, "pid": 0, "tid": 0, "ts": at_ns / 1000}


def _encoded(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), allow_nan=False)


def _lines(timeline: Timeline) -> Iterator[str]:
    yield from _slices(timeline)
    yield from _flows(timeline)
    yield from _counters(timeline)


def _slices(timeline: Timeline) -> Iterator[str]:
    spans = timeline.spans
    names = [json.dumps(operation_name(number)) for number in range(MAX_OPERATIONS * 4)]
    tracks = [(track.rank, track.number) for track in timeline.tracks]
    group_names = {
        key: json.dumps(printable(members.name)) for key, members in timeline.roster.groups.items() if members.name
    }
    columns = zip(
        *(spans.operation.tolist(), timeline.begin_ns.tolist(), timeline.length_ns.tolist()),
        *(timeline.track_of.tolist(), spans.step.tolist(), spans.microbatch.tolist(), spans.chunk.tolist()),
        *(spans.group.tolist(), spans.collective.tolist(), spans.num_bytes.tolist(), spans.flags.tolist()),
        *(spans.duration_ns.tolist(), (spans.start_ns - spans.launch_ns).tolist()),
        strict=True,
    )
    for number, begin, length, track, step, micro, chunk, group, place, num_bytes, flags, duration, waited in columns:
        rank, tid = tracks[track]
        args = f'"step":{step}'
        if micro >= 0:
            args += f',"microbatch":{micro}'
        if chunk >= 0:
            args += f',"chunk":{chunk}'
        if group:
            args += f',"group":{group_names.get((rank, group), group)},"collective":{place}'
        if num_bytes:
            args += f',"bytes":{num_bytes}'
        if flags & RecordFlag.DEVICE_CLOCK:
            args += f',"issue_us":{_us(max(0, waited))}'
        if flags & RecordFlag.FAILED:
            args += ',"has_failed":true'
        if duration == NO_DURATION:
            args += ',"is_open":true'
        yield (
            f'{{"ph":"X","name":{names[number]},"pid":{rank},"tid":{tid},"ts":{_us(begin)},'
            f'"dur":{_us(length)},"args":{{{args}}}}}'
        )


def _flows(timeline: Timeline) -> Iterator[str]:
    begin, length, track_of = timeline.begin_ns, timeline.length_ns, timeline.track_of
    for number, (send, receive) in enumerate(timeline.flows.tolist(), start=1):
        start, finish = timeline.tracks[track_of[send]], timeline.tracks[track_of[receive]]
        same = f'"cat":"{_FLOW_NAME}","name":"{_FLOW_NAME}","id":{number}'
        yield f'{{"ph":"s",{same},"pid":{start.rank},"tid":{start.number},"ts":{_us(int(begin[send]))}}}'
        # one ns before the end of the slice, because the end belongs to the next slice
        arrived = int(begin[receive] + length[receive]) - 1
        yield f'{{"ph":"f","bp":"e",{same},"pid":{finish.rank},"tid":{finish.number},"ts":{_us(arrived)}}}'


def _counters(timeline: Timeline) -> Iterator[str]:
    values = timeline.values
    names = counter_names(values)
    at = (values.at_ns - timeline.base_ns).tolist()
    for name, rank, when, value in zip(names, values.rank.tolist(), at, values.value.tolist(), strict=True):
        counted = {"ph": "C", "name": name, "pid": rank, "args": {name: value}}
        yield f'{_encoded(counted)[:-1]},"ts":{_us(when)}}}'


def _us(ns: int) -> str:
    """Return microseconds with three decimals, without conversion to float."""
    return f"{ns // 1000}.{ns % 1000:03d}"
