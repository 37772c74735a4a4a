"""The position of a rank: on its device if the host has run ahead, else on the host (ADR 0061), and the suspect."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import GroupRecord, Phase, Progress, Record, RecordFlag
from megatrain_job.failures.hang import Confidence, Position, hang_suspects
from megatrain_job.failures.hang_activity import HangActivity, activity_of

DONE, BEGUN, AWAITED = RecordFlag.HOST_DONE, RecordFlag.DEVICE_BEGUN, RecordFlag.DEVICE_AWAITED
TP, DP, LINK, STRANGE = 1, 2, 3, 4
GROUPS = {
    TP: GroupRecord(TP, "tp", 0, 1, 2, entered=40, left=38),
    DP: GroupRecord(DP, "dp", 0, 2, 4, entered=5, left=4),
    LINK: GroupRecord(LINK, "link", 0, 1, 2, entered=9, left=8),
    STRANGE: GroupRecord(STRANGE, "strange", 0, 0, 3, entered=7, left=6),
}
ENTERED = {TP: 40, DP: 5, LINK: 9}
"""Timed by the host."""
LAST_LAUNCH_NS = 100
FORWARD, GATHER, REDUCE, SUM, RECEIVE = (
    Operation.FORWARD_COMPUTE, Operation.PARAMS_ALL_GATHER, Operation.GRADS_REDUCE_SCATTER, Operation.TP_ALL_REDUCE,
    Operation.FORWARD_RECV,
)  # fmt: skip


def on_host(operation: Operation, group: int = 0, sequence: int = 0, duration_ns: int | None = None) -> Record:
    """Return a span that the host times, open unless it has a duration."""
    return Record(
        1, 50, duration_ns, 50, 0, 3, sequence, -1, -1, operation.number, group, RecordFlag.NONE
    )  # fmt: skip


def launched(
    operation: Operation, flags: RecordFlag = RecordFlag.NONE, group: int = 0, sequence: int = 0
) -> Record:  # fmt: skip
    """Return an open span of the device, launched before LAST_LAUNCH_NS."""
    flags |= RecordFlag.DEVICE_CLOCK
    return replace(on_host(operation, group, sequence), flags=flags, launch_ns=LAST_LAUNCH_NS, start_ns=LAST_LAUNCH_NS)


def progress_of(seen_ns: int | None = None, group: int = 0, place: int = 0) -> Progress:
    return Progress(
        Phase.STEP, 0, 3, 0, 2, 0, None, None, 0, 0, awaited_group=group, awaited_place=place, device_seen_ns=seen_ns
    )


@dataclass(frozen=True)
class Case:
    """The records of a rank, and its position. `awaited`: (group, sequence); on a device, (0, 0) waits for none."""

    records: tuple[Record, ...]
    in_flight: str
    awaited: tuple[int | None, int]
    is_busy: bool
    is_on_device: bool = True
    entered: dict[int, int] = field(default_factory=lambda: ENTERED)
    seen_ns: int | None = LAST_LAUNCH_NS + 1
    host_waits: tuple[int, int] = (0, 0)
    groups: dict[int, GroupRecord] = field(default_factory=lambda: GROUPS)


def with_entered(group: int, entered: int) -> dict[int, GroupRecord]:
    return GROUPS | {group: replace(GROUPS[group], entered=entered)}


BEYOND = 1 << 32
COMPUTES = launched(FORWARD, DONE | BEGUN)
QUEUED = launched(REDUCE, DONE, DP, 5)
CASES = {
    "nothing is recorded": Case((), "", (None, 0), False, is_on_device=False),
    "the host loads data": Case(
        (on_host(Operation.STEP), on_host(Operation.DATA_WAIT)), "data-wait", (None, 0), True, is_on_device=False
    ),
    "the host is between the parts of a step": Case(
        (on_host(Operation.STEP), on_host(Operation.DATA_WAIT, duration_ns=9)), "step", (None, 0), False, False
    ),
    "the host waits in an exchange": Case(
        (on_host(Operation.STEP), on_host(SUM, TP, 40)), "tp-all-reduce", (TP, 40), False, False, host_waits=(TP, 40)
    ),
    "the device was never polled": Case(
        (on_host(Operation.OPTIMIZER), COMPUTES), "optimizer", (None, 0), True, is_on_device=False, seen_ns=None
    ),
    "the poll is older than the last launch": Case(
        (COMPUTES, launched(REDUCE, DONE | BEGUN | AWAITED, DP, 5), on_host(Operation.CHECKPOINT)),
        "checkpoint", (DP, 5), True, is_on_device=False, seen_ns=LAST_LAUNCH_NS - 1, host_waits=(DP, 5),
    ),
    "an old poll, and the host has done all": Case(
        (COMPUTES, QUEUED), "grads-reduce-scatter", (None, 0), False, is_on_device=False, seen_ns=LAST_LAUNCH_NS - 1
    ),
    "the device has done all": Case((on_host(Operation.GC),), "gc", (None, 0), True, is_on_device=False),
    "the device computes, and the host ran ahead": Case(
        (on_host(SUM, TP, 40), COMPUTES, QUEUED), "forward-compute", (0, 0), True, entered=ENTERED | {DP: 4}
    ),
    "the device is in the inner of two spans": Case(
        (COMPUTES, launched(Operation.CLIP, BEGUN), QUEUED), "clip", (0, 0), True, entered=ENTERED | {DP: 4}
    ),
    "the device is idle between two records": Case((QUEUED,), "", (0, 0), True, entered=ENTERED | {DP: 4}),
    "compute is launched and not begun": Case((launched(FORWARD, DONE),), "", (0, 0), True),
    "compute waits for an exchange that has begun": Case(
        (launched(FORWARD, DONE | BEGUN), launched(SUM, DONE | BEGUN | AWAITED, TP, 40), QUEUED),
        "tp-all-reduce", (TP, 40), False, entered=ENTERED | {DP: 4},
    ),
    "compute waits for an exchange that has not begun": Case(
        (launched(SUM, DONE | AWAITED, TP, 40),), "tp-all-reduce", (TP, 40), False, entered=ENTERED | {TP: 39}
    ),
    "the awaited exchange is queued behind another": Case(
        (launched(GATHER, DONE | BEGUN, DP, 4), launched(GATHER, DONE | AWAITED, DP, 5)),
        "params-all-gather", (DP, 4), False, entered=ENTERED | {DP: 4},
    ),
    "nor behind a collective along another axis": Case(
        (launched(REDUCE, DONE | BEGUN, DP, 5), launched(GATHER, DONE | BEGUN, TP, 39),
         launched(SUM, DONE | AWAITED, TP, 40)),
        "params-all-gather", (TP, 39), False, entered=ENTERED | {TP: 39},
    ),
    "it is not queued behind a message, which has a stream of its own": Case(
        (launched(RECEIVE, DONE | BEGUN, LINK, 9), launched(GATHER, DONE | BEGUN, DP, 4),
         launched(GATHER, DONE | AWAITED, DP, 5)),
        "params-all-gather", (DP, 4), False, entered=ENTERED | {DP: 4},
    ),
    "a message is not queued behind a collective": Case(
        (launched(REDUCE, DONE | BEGUN, DP, 5), launched(RECEIVE, DONE | AWAITED, LINK, 9)),
        "forward-recv", (LINK, 9), False, entered=ENTERED | {LINK: 8},
    ),
    "an exchange in the background delays no compute": Case(
        (launched(REDUCE, DONE | BEGUN, DP, 5), COMPUTES), "forward-compute", (0, 0), True
    ),
    "several exchanges of a group have not begun": Case(
        (COMPUTES, *(launched(SUM, DONE, TP, place) for place in (38, 39, 40))),
        "forward-compute", (0, 0), True, entered=ENTERED | {TP: 37},
    ),
    "the sequence is above 2^32": Case(
        (COMPUTES, launched(SUM, DONE, TP, 3), launched(SUM, DONE, TP, 4)), "forward-compute", (0, 0), True,
        entered=ENTERED | {TP: BEYOND + 2}, groups=with_entered(TP, BEYOND + 4),
    ),
    "it passed 2^32 since": Case(
        (launched(SUM, DONE | BEGUN | AWAITED, TP, BEYOND - 1), launched(SUM, DONE, TP, 0), launched(SUM, DONE, TP, 1)),
        "tp-all-reduce", (TP, BEYOND - 1), False,
        entered=ENTERED | {TP: BEYOND - 1}, groups=with_entered(TP, BEYOND + 1),
    ),
    "compute waits in a group whose ranks are not known": Case(
        (COMPUTES, launched(SUM, DONE | BEGUN | AWAITED, STRANGE, 7)), "tp-all-reduce", (None, 0), False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_position_is_that_of_the_device_where_it_is_known(name: str) -> None:
    case = CASES[name]
    found = activity_of(case.records, progress_of(case.seen_ns, *case.host_waits), case.groups)

    assert found == HangActivity(case.entered, *case.awaited, case.in_flight, case.is_busy, case.is_on_device)


WAITS = ((launched(REDUCE, DONE | BEGUN | AWAITED, DP, 5),), LAST_LAUNCH_NS + 1)
COMPUTING = ((COMPUTES, QUEUED), LAST_LAUNCH_NS + 1)
UNSEEN = ((launched(FORWARD, DONE), QUEUED), None)
"""A rank whose device is not read: its host has entered the exchange and waits for it."""
Seen = tuple[tuple[Record, ...], int | None]
JOBS: dict[str, tuple[list[Seen], dict[int, str], tuple[int, ...], Confidence]] = {
    "one computes": ([WAITS, WAITS, COMPUTING, WAITS], {}, (2,), Confidence.CERTAIN),
    "some ranks are not read": ([UNSEEN, WAITS, COMPUTING, UNSEEN], {}, (2,), Confidence.CERTAIN),
    "no rank is read": ([UNSEEN] * 4, {}, (), Confidence.WEAK),
    "all have begun": ([WAITS] * 4, {}, (), Confidence.WEAK),
    "all compute except one": ([WAITS, COMPUTING, COMPUTING, COMPUTING], {}, (1, 2, 3), Confidence.CERTAIN),
    "one is stopped": ([WAITS] * 4, {0: "S", 1: "T", 2: "D"}, (1,), Confidence.CERTAIN),
    "one is dead": ([WAITS] * 4, {0: "Z", 1: "R"}, (0,), Confidence.CERTAIN),
    "one waits for a disk or driver": ([WAITS] * 4, {3: "D"}, (), Confidence.WEAK),
    "one is stopped, and another one computes": ([WAITS, COMPUTING, WAITS, WAITS], {3: "T"}, (3,), Confidence.CERTAIN),
}
"""For four ranks of a group: their records, the states of their processes, the suspects."""


@pytest.mark.parametrize("name", JOBS)
def test_suspects_follow_from_devices_hosts_and_processes(name: str) -> None:
    seen, states, suspects, confidence = JOBS[name]
    positions, busy = {}, []
    for rank, (records, seen_ns) in enumerate(seen):
        activity = activity_of(records, progress_of(seen_ns, DP, 5), GROUPS)
        awaited = activity.awaited if activity.awaited_group == DP else 0
        positions[rank] = {"dp": Position(activity.entered[DP], GROUPS[DP].left, awaited)}
        busy += [rank] if activity.is_busy else []

    report = hang_suspects(positions, {"dp": range(4)}, busy=busy, states=states)

    assert (report.suspects, report.confidence) == (suspects, confidence)
