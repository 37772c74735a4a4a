"""The rules of one stage's action list: its contents, its order, and how much the stage keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain.schedule.action import MESSAGES_OF, MICROBATCH_ENDS, Action, ActionKind, Schedule
from megatrain.schedule.build import FORWARD_ONLY

# The messages with the model chunk before this one, and with the model chunk after it.
_TOWARDS_INPUT = (ActionKind.RECV_FORWARD, ActionKind.SEND_BACKWARD)
_TOWARDS_LOSS = (ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD)

Precedence = tuple[Action, Action, str]
"""An action, an action that must come later in the list, and the text of the rule."""


def check_stages(schedule: Schedule, pending_receives_bound: int) -> list[str]:
    """Return the violations inside each stage's list."""
    problems: list[str] = []
    precedences = list(_precedences(schedule))
    for stage, actions in enumerate(schedule.stages):
        positions: dict[Action, int] = {}
        for position, action in enumerate(actions):
            if (earlier := positions.setdefault(action, position)) != position:
                problems.append(f"{_place(stage, position, action)}: already at position {earlier}; each is done once")
        local = [pair for pair in precedences if not _is_at_end(schedule, stage, pair)]
        problems += _check_contents(stage, positions, local)
        problems += _check_order(stage, positions, local)
        problems += _check_pending_receives(stage, actions, pending_receives_bound)
    return problems


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return each stage's largest number of forwards without a complete backward, in micro-batches of one chunk.

    A schedule without backwards holds nothing: its peaks are 0.
    """
    return tuple(_peak_in_flight(actions) for actions in schedule.stages)


def _peak_in_flight(actions: Sequence[Action]) -> int:
    held = peak = num_backwards = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.kind in MICROBATCH_ENDS:
            held -= 1
            num_backwards += 1
    return peak if num_backwards else 0


def _place(stage: int, position: int, action: Action) -> str:
    return f"stage {stage}, position {position}, {action}"


def _precedences(schedule: Schedule) -> Iterator[Precedence]:
    """Yield the order rules of a stage in the middle of the model. Each of its actions is in at least one rule."""
    has_backward = schedule.name != FORWARD_ONLY
    is_split = _splits_backward(schedule)
    for chunk in range(schedule.num_chunks):
        gather, reduce = Action(ActionKind.GATHER, chunk, -1), Action(ActionKind.REDUCE, chunk, -1)
        for microbatch in range(schedule.num_microbatches):
            forward = Action(ActionKind.FORWARD, chunk, microbatch)
            yield gather, forward, "a chunk's parameters are gathered before its first forward"
            yield from _around(forward)
            if not has_backward:
                continue
            backward = Action(ActionKind.DGRAD if is_split else ActionKind.BACKWARD, chunk, microbatch)
            yield forward, backward, "a forward comes before its backward"
            yield from _around(backward)
            end = backward
            if is_split:
                end = Action(ActionKind.WGRAD, chunk, microbatch)
                yield backward, end, "deferred wgrads run after their dgrad"
            yield end, reduce, "a chunk's gradients are reduced after its last backward"


def _splits_backward(schedule: Schedule) -> bool:
    """Whether all backwards must be split, because at least one is split."""
    return any(
        action.kind is ActionKind.DGRAD or action.kind is ActionKind.WGRAD
        for actions in schedule.stages
        for action in actions
    )


def _around(compute: Action) -> Iterator[Precedence]:
    receive, send = MESSAGES_OF[compute.kind]
    yield Action(receive, compute.chunk, compute.microbatch), compute, "a receive is posted before its consumer"
    yield compute, Action(send, compute.chunk, compute.microbatch), "a result is sent after it is computed"


def _is_at_end(schedule: Schedule, stage: int, pair: Precedence) -> bool:
    """Return whether the rule is about a message that would come from before the input or go beyond the loss."""
    is_at_input = schedule.placement.is_first(stage, pair[0].chunk)
    is_at_loss = schedule.placement.is_last(stage, pair[0].chunk)
    return any(
        (is_at_input and action.kind in _TOWARDS_INPUT) or (is_at_loss and action.kind in _TOWARDS_LOSS)
        for action in pair[:2]
    )


def _check_contents(stage: int, positions: dict[Action, int], precedences: list[Precedence]) -> list[str]:
    expected = {action: None for earlier, later, _ in precedences for action in (earlier, later)}
    problems = [f"stage {stage}: {action} is missing" for action in expected if action not in positions]
    problems += (
        f"{_place(stage, position, action)}: this stage has no such action in this schedule"
        for action, position in positions.items()
        if action not in expected
    )
    return problems


def _check_order(stage: int, positions: dict[Action, int], precedences: list[Precedence]) -> list[str]:
    problems: list[str] = []
    for earlier, later, rule in precedences:
        first, second = positions.get(earlier), positions.get(later)
        if first is not None and second is not None and first > second:
            problems.append(f"{_place(stage, second, later)}: comes before {earlier} at position {first}; {rule}")
    return problems


def _check_pending_receives(stage: int, actions: Sequence[Action], bound: int) -> list[str]:
    pending: set[Action] = set()
    for position, action in enumerate(actions):
        if action.kind is ActionKind.RECV_FORWARD or action.kind is ActionKind.RECV_BACKWARD:
            pending.add(action)
            if len(pending) > bound:
                excess = f"{len(pending)} receives are posted and not consumed; at most {bound} may be"
                return [f"{_place(stage, position, action)}: {excess}"]
        elif action.kind in MESSAGES_OF:
            pending.discard(Action(MESSAGES_OF[action.kind][0], action.chunk, action.microbatch))
    return []
