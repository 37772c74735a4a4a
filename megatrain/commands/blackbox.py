"""`megatrain blackbox FILE`: show from a black box what a rank, running or dead, was doing.

Prints the header, the control page, the totals of the last step and the newest records. Operations that had begun and
not ended are marked "IN FLIGHT", with their age.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatrain.commands.argument_types import add_json, whole_number
from megatrain.commands.printing import facts, print_result, table
from megatrain.config.recording import TelemetryConfig
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import BlackBox, read_black_box
from megatrain.contracts.black_box.values import ALL_OPERATIONS, ControlPage, Record, RecordFlag, State, StepTotal
from megatrain.contracts.exit_codes import ExitCode
from megatrain.programs.processes import process_stat
from megatrain.run_files.run_directory import own_box_directory

SUMMARY = "print the black box of a rank: what it was doing when it hung or died"

_COLUMNS = ("time_ms", "step", "operation", "mb", "chunk", "duration_us", "bytes", "group", "seq", "")
_TEXT_COLUMNS = (2, 7, 9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    example = own_box_directory(Path(TelemetryConfig().black_box_directory)) / "megatrain.*.blackbox"
    parser.add_argument("file", type=Path, metavar="FILE", help=f"a black box, for example {example}")
    parser.add_argument("--last", type=whole_number(1), metavar="N", default=40, help="newest N records (default: 40)")
    parser.add_argument(
        "--in-flight", action="store_true", help="only records of operations that have begun and not ended"
    )
    parser.add_argument(
        "--operation",
        choices=[operation.value for operation in Operation],
        metavar="NAME",
        help="only records of one operation, for example forward-compute",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the black box. Raises: DataError when the file is not an intact black box."""
    box = read_black_box(args.file)
    now_ns = time.monotonic_ns() if is_running(box) else box.newest_ns
    records = chosen_records(box, args.operation, args.in_flight, args.last)
    print_result(
        lambda: json_values(box, records, now_ns), lambda: lines_of(box, records, now_ns), is_json=args.is_json
    )
    return int(ExitCode.OK)


def is_running(box: BlackBox) -> bool:
    """Return whether the rank's process appears to run on this host. If not, ages are as of the newest record."""
    if box.state is not State.RUNNING or box.identity.host != socket.gethostname():
        return False
    stat = process_stat(box.identity.pid)
    return stat is not None and not stat.is_dead


def chosen_records(box: BlackBox, operation: str | None, is_in_flight_only: bool, last: int) -> tuple[Record, ...]:
    """Return the newest `last` records that pass the filters, oldest first."""
    records = box.in_flight if is_in_flight_only else box.records
    return tuple(record for record in records if operation in (None, record.operation))[-last:]


def json_values(box: BlackBox, records: Sequence[Record], now_ns: int) -> dict[str, Any]:
    """Return the content for JSON. Times are monotonic ns of the rank's host."""
    at = box.identity.coordinate
    last_step = [total for total in box.totals if total.step == box.progress.completed_step]
    return {
        "file": str(box.path),
        "identity": {**asdict(box.identity), "layout": box.identity.layout.sizes, "coordinate": at},
        "clock": asdict(box.clock),
        "state": box.state.name.lower(),
        "is_running": is_running(box),
        "ended_ns": box.ended_ns,
        "now_ns": now_ns,
        "capacity": box.capacity,
        "num_recorded": box.cursor,
        "num_torn": box.num_torn,
        "progress": {**asdict(box.progress), "phase": box.progress.phase.name.lower()},
        "control": None if box.control is None else asdict(box.control),
        "groups": [asdict(group) for _, group in sorted(box.groups.items())],
        "last_step_totals": [_json_total(total) for total in last_step],
        "records": [_json_record(box, record, now_ns) for record in records],
    }


def _json_total(total: StepTotal) -> dict[str, Any]:
    return {"operation": total.operation, **asdict(total)}


def _json_record(box: BlackBox, record: Record, now_ns: int) -> dict[str, Any]:
    group = box.groups.get(record.group)
    return {
        "operation": record.operation,
        **asdict(record),
        "group_name": group.name if group else None,
        "flags": _flag_names(record.flags),
        "age_ns": max(0, now_ns - record.start_ns) if record.is_in_flight else None,
    }


def _flag_names(flags: RecordFlag) -> list[str]:
    return [flag.name.lower() for flag in RecordFlag if flag.name and flag in flags]


def lines_of(box: BlackBox, records: Sequence[Record], now_ns: int) -> list[str]:
    """Return the header, the control page, the last step's totals and the records as lines for people."""
    return [*_facts(box, now_ns), "", *_totals(box), *_table(box, records, now_ns)]


def _facts(box: BlackBox, now_ns: int) -> list[str]:
    identity, at, progress = box.identity, box.identity.coordinate, box.progress
    layout = identity.layout
    state = {State.RUNNING: "running" if is_running(box) else "killed, or running on another host"}
    grid = ", ".join(f"{axis} {place}/{layout.size(axis)}" for axis, place in at.items())
    phase = f"{progress.phase.name.lower()} for {_seconds(now_ns - progress.phase_since_ns)}"
    steps = f"step {_known(progress.current_step)}, completed {_known(progress.completed_step)}"
    times = f"last step {_milliseconds(progress.last_step_ns)}, typical {_milliseconds(progress.median_step_ns)}"
    kept = f"{len(box.records)} of the last {min(box.cursor, box.capacity)}, {len(box.in_flight)} in flight"
    opened, alive = _utc(box.clock.unix_ns), _utc(box.clock.unix_of(box.newest_ns))
    pairs = [
        ("job", f"{identity.job}  branch {identity.branch}  round {identity.round}"),
        ("rank", f"{identity.rank} of {layout.world_size}  ({grid})"),
        ("process", f"{identity.pid} on {identity.host}, {state.get(box.state, box.state.name.lower())}"),
        ("opened", f"{opened} (times below count from then), last sign of life {alive}"),
        ("progress", f"{phase}; {steps}; {times}"),
        ("control", _control(box.control, now_ns)),
        ("records", f"{kept}, {box.num_torn} torn, {progress.num_lost_ends} ended after being overwritten"),
    ]
    pairs += [
        (f"group {number}", f"{group.name}: {_members(group.ranks)}; entered {group.entered}, left {group.left}")
        for number, group in sorted(box.groups.items())
    ]
    return facts(pairs)


def _control(page: ControlPage | None, now_ns: int) -> str:
    if page is None:
        return "incomplete: the executor died while it wrote the page"
    mask = "all operations" if page.span_mask == ALL_OPERATIONS else f"operations {page.span_mask:#x}"
    lease = "no lease"
    if page.lease_ok_until_ns:
        left_ns = page.lease_ok_until_ns - now_ns
        lease = f"lease ends in {_seconds(left_ns)}" if left_ns > 0 else "lease has ended"
    writer = f"written {_seconds(now_ns - page.written_ns)} ago" if page.written_ns else "never written"
    command = f"command {page.command} (number {page.command_number})"
    steps = "every step" if page.sample_period == 1 else f"every {page.sample_period} steps"
    return f"{writer}; round {page.round}, {command}, {mask}, all spans streamed {steps}, {lease}"


def _totals(box: BlackBox) -> list[str]:
    totals = [total for total in box.totals if total.step == box.progress.completed_step]
    if not totals:
        return []
    rows = [("total_ms", "longest_us", "count", "operation")]
    rows += [(f"{total.sum_ns / 1e6:.3f}", f"{total.max_ns / 1e3:.1f}", str(total.count), total.operation)
             for total in totals]  # fmt: skip
    return [f"step {box.progress.completed_step} by operation:", *table(rows, left=(3,)), ""]


def _table(box: BlackBox, records: Sequence[Record], now_ns: int) -> list[str]:
    if not records:
        return ["no records"]
    return table([_COLUMNS, *(_row(box, record, now_ns) for record in records)], _TEXT_COLUMNS)


def _row(box: BlackBox, record: Record, now_ns: int) -> tuple[str, ...]:
    group = box.groups.get(record.group)
    duration, remark = "", ""
    if record.duration_ns is None:
        where = " on the device" if record.flags & RecordFlag.HOST_DONE else ""
        remark = f"IN FLIGHT{where} for {_seconds(now_ns - record.start_ns)}"
    else:
        duration = f"{record.duration_ns / 1e3:.1f}"
    if record.flags & RecordFlag.FAILED:
        remark = f"{remark} FAILED".strip()
    return (
        f"{(record.start_ns - box.clock.monotonic_ns) / 1e6:.3f}",
        str(record.step),
        record.operation,
        _index(record.microbatch),
        _index(record.chunk),
        duration,
        str(record.num_bytes) if record.num_bytes else "",
        group.name if group else "",
        str(record.collective_sequence) if record.group else "",
        remark,
    )


def _index(value: int) -> str:
    return "" if value < 0 else str(value)


def _known(step: int | None) -> str:
    return "none" if step is None else str(step)


def _members(ranks: range) -> str:
    if len(ranks) <= 8:
        return f"ranks {', '.join(map(str, ranks))}" if ranks else "ranks unknown"
    return f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]} by {ranks.step}"


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.3f} s"


def _milliseconds(duration_ns: int | None) -> str:
    return "unknown" if duration_ns is None else f"{duration_ns / 1e6:.3f} ms"


def _utc(unix_ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(unix_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{unix_ns} ns since 1970"
