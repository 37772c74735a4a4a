"""Runs a schedule without computing: finds the slot of each compute, or the position where each stage blocks.

Channels are first in, first out, so the comparison of two counters shows whether a message has arrived. A compute takes
one slot and a message none; real durations are not modeled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.schedule.action import COMPUTES, MESSAGES_OF, Action, ActionKind, Schedule
from megatrain.schedule.chunk_placement import ChunkPlacement

_RECEIVE_OF = {compute: receive for compute, (receive, _) in MESSAGES_OF.items()}


@dataclass(frozen=True, slots=True)
class StageChannel:
    """All messages from one stage to another in one direction of the model; a wrap-around link has its own channel."""

    direction: str
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.direction} channel {self.source}->{self.destination}"


@dataclass(frozen=True, slots=True)
class Blocked:
    """A stage that waits forever: its position, and the message (counted from 0) and channel that it waits for."""

    stage: int
    position: int
    channel: StageChannel
    message: int


@dataclass(frozen=True, slots=True)
class Execution:
    """The slot of every compute that ran, by stage in list order, and the stages that did not reach their end."""

    slots: tuple[tuple[int, ...], ...]
    blocked: tuple[Blocked, ...]


class StageChannels:
    """The channels of a pipeline by the stage, kind and chunk of the actions that use them."""

    def __init__(self, placement: ChunkPlacement) -> None:
        self._of_stages = [_channels_of(placement, stage) for stage in range(placement.pp_size)]

    def all(self) -> list[StageChannel]:
        return list(
            dict.fromkeys(channel for of in self._of_stages for by_chunk in of.values() for channel in by_chunk)
        )

    def of_stage(self, stage: int) -> dict[ActionKind, list[StageChannel]]:
        """Return the channel of each kind of message of this stage, by chunk."""
        return self._of_stages[stage]


def _channels_of(placement: ChunkPlacement, stage: int) -> dict[ActionKind, list[StageChannel]]:
    chunks = range(placement.num_chunks)
    after = [placement.neighbor(stage, chunk, +1) for chunk in chunks]
    before = [placement.neighbor(stage, chunk, -1) for chunk in chunks]
    return {
        ActionKind.SEND_FORWARD: [StageChannel("forward", stage, other) for other in after],
        ActionKind.RECV_FORWARD: [StageChannel("forward", other, stage) for other in before],
        ActionKind.SEND_BACKWARD: [StageChannel("backward", stage, other) for other in before],
        ActionKind.RECV_BACKWARD: [StageChannel("backward", other, stage) for other in after],
    }


class _Mailbox:
    """The messages of one channel during an execution."""

    __slots__ = ("arrivals", "channel", "num_received")

    def __init__(self, channel: StageChannel) -> None:
        self.channel = channel
        self.arrivals: list[int] = []
        self.num_received = 0


class _Stage:
    """One stage during an execution."""

    def __init__(self, stage: int, actions: Sequence[Action], mailboxes: dict[ActionKind, list[_Mailbox]]) -> None:
        self.stage = stage
        self.slots: list[int] = []
        self.awaited: tuple[_Mailbox, int] | None = None
        self.position = 0
        self._actions = actions
        self._mailboxes = mailboxes
        self._next_slot = 0
        self._posted: dict[tuple[ActionKind | None, int, int], tuple[_Mailbox, int]] = {}

    def advance(self) -> set[int]:
        """Execute until the end or until a message is missing; return the stages to which it sent messages."""
        self.awaited = None
        reached: set[int] = set()
        for position in range(self.position, len(self._actions)):
            action = self._actions[position]
            kind = action.kind
            if kind in COMPUTES:
                receive = self._posted.get((_RECEIVE_OF.get(kind), action.chunk, action.microbatch))
                if receive is not None:
                    mailbox, message = receive
                    if message >= len(mailbox.arrivals):
                        self.position, self.awaited = position, receive
                        return reached
                    self._next_slot = max(self._next_slot, mailbox.arrivals[message])
                self.slots.append(self._next_slot)
                self._next_slot += 1
            elif kind is ActionKind.SEND_FORWARD or kind is ActionKind.SEND_BACKWARD:
                mailbox = self._mailboxes[kind][action.chunk]
                mailbox.arrivals.append(self._next_slot)
                reached.add(mailbox.channel.destination)
            elif kind is ActionKind.RECV_FORWARD or kind is ActionKind.RECV_BACKWARD:
                mailbox = self._mailboxes[kind][action.chunk]
                self._posted[kind, action.chunk, action.microbatch] = (mailbox, mailbox.num_received)
                mailbox.num_received += 1
        self.position = len(self._actions)
        return reached


def execute(schedule: Schedule) -> Execution:
    """Execute all stages as far as possible; a compute without a posted receive does not wait."""
    channels = StageChannels(schedule.placement)
    mailboxes = {channel: _Mailbox(channel) for channel in channels.all()}
    stages = [
        _Stage(
            stage,
            actions,
            {kind: [mailboxes[channel] for channel in by_chunk] for kind, by_chunk in channels.of_stage(stage).items()},
        )
        for stage, actions in enumerate(schedule.stages)
    ]
    runnable = list(stages)
    while runnable:
        for reached in sorted(runnable.pop().advance()):
            stage = stages[reached]
            if stage.awaited is not None and stage not in runnable:
                mailbox, message = stage.awaited
                if message < len(mailbox.arrivals):
                    runnable.append(stage)
    blocked = tuple(
        Blocked(stage.stage, stage.position, stage.awaited[0].channel, stage.awaited[1])
        for stage in stages
        if stage.awaited is not None
    )
    return Execution(tuple(tuple(stage.slots) for stage in stages), blocked)
