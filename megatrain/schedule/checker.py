"""Proves that a schedule is correct, or names each violation: stage, position, action, rule.

Three passes: every stage by itself (each action exactly once and in a legal order, memory and pending receives within
their bounds), every channel (the n-th send carries what the n-th receive expects), and an execution (no deadlock).
The proof holds under the semantics of action.py, for any durations.
"""

from __future__ import annotations

from itertools import zip_longest

from megatrain.schedule.action import ActionKind, Schedule
from megatrain.schedule.execution import Blocked, StageChannel, StageChannels, execute
from megatrain.schedule.kinds import KINDS, in_flight_bound, infeasibility
from megatrain.schedule.lowering import RECEIVES_AHEAD
from megatrain.schedule.stage_rules import check_stages, peak_in_flight

PENDING_RECEIVES_BOUND = RECEIVES_AHEAD + 1
"""The maximum number of receives that are posted and not consumed: that of the next compute, and one posted ahead."""

_RECEIVES = (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)


def check_schedule(schedule: Schedule, pending_receives_bound: int = PENDING_RECEIVES_BOUND) -> list[str]:
    """Return one message for every violation; an empty list means that the schedule is correct.

    A schedule with a name that is not in KINDS is checked for everything except the peak of activations, for which
    there is no closed form.
    """
    if len(schedule.stages) != schedule.pp_size:
        return [f"schedule {schedule.name!r} has {len(schedule.stages)} action lists for pp_size={schedule.pp_size}"]
    return [
        *check_stages(schedule, pending_receives_bound),
        *_check_peaks(schedule),
        *_check_channels(schedule),
        *_check_deadlock(schedule),
    ]


def _check_peaks(schedule: Schedule) -> list[str]:
    sizes = (schedule.name, schedule.pp_size, schedule.num_chunks, schedule.num_microbatches)
    if schedule.name not in KINDS:
        return []
    if (problem := infeasibility(*sizes)) is not None:
        return [problem]
    return [
        f"stage {stage}: {peak} activations are held at once; schedule {schedule.name!r} may hold {bound}"
        for stage, (peak, bound) in enumerate(zip(peak_in_flight(schedule), in_flight_bound(*sizes), strict=True))
        if peak > bound
    ]


Message = tuple[int, int]
"""The model chunk nearer to the input, and the micro-batch: sender and receiver must agree on them."""


def _messages(schedule: Schedule) -> dict[StageChannel, tuple[list[tuple[Message, int]], list[tuple[Message, int]]]]:
    """Return each channel's sends and receives in order, each as the message and its position in the stage's list."""
    channels = StageChannels(schedule.placement)
    found: dict[StageChannel, tuple[list[tuple[Message, int]], list[tuple[Message, int]]]] = {
        channel: ([], []) for channel in channels.all()
    }
    for stage, actions in enumerate(schedule.stages):
        of_stage = channels.of_stage(stage)
        for position, action in enumerate(actions):
            if action.kind in of_stage:
                channel = of_stage[action.kind][action.chunk]
                is_towards_input = action.kind in (ActionKind.RECV_FORWARD, ActionKind.SEND_BACKWARD)
                chunk = schedule.placement.model_chunk(stage, action.chunk) - is_towards_input
                found[channel][action.kind in _RECEIVES].append(((chunk, action.microbatch), position))
    return found


def _check_channels(schedule: Schedule) -> list[str]:
    """Compare each channel's sends with its receives; report only the first difference, which causes the others."""
    problems: list[str] = []
    for channel, (sends, receives) in _messages(schedule).items():
        for number, (send, receive) in enumerate(zip_longest(sends, receives)):
            if send is not None and receive is not None and send[0] == receive[0]:
                continue
            sent = _end(schedule, channel.source, send)
            received = _end(schedule, channel.destination, receive)
            problems.append(f"{channel}, message {number}: sent by {sent}, received by {received}")
            break
    return problems


def _end(schedule: Schedule, stage: int, message: tuple[Message, int] | None) -> str:
    if message is None:
        return f"nothing on stage {stage}"
    return f"stage {stage}, position {message[1]}, {schedule.stages[stage][message[1]]}"


def _check_deadlock(schedule: Schedule) -> list[str]:
    blocked = execute(schedule).blocked
    stops = {stop.stage: stop for stop in blocked}
    return [_deadlock(schedule, stop, stops.get(stop.channel.source)) for stop in blocked]


def _deadlock(schedule: Schedule, stop: Blocked, source: Blocked | None) -> str:
    action = schedule.stages[stop.stage][stop.position]
    sender = f"stage {stop.channel.source}"
    if source is None:
        where = f"{sender} has ended"
    else:
        where = f"{sender} itself stops at position {source.position}"
    return (
        f"deadlock: stage {stop.stage}, position {stop.position}, {action}: waits for message {stop.message} "
        f"of the {stop.channel}, but {where}"
    )
