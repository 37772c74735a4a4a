"""Finds the compute of each message between stages, and the receive of each send.

Traces do not contain these relations; the n-th receive of a direction belongs to its n-th compute. Traces also contain
messages that were never sent: at the ends of a step (a receive posted after the last compute started, a send that ended
before the first compute did), and, if stages have several chunks, the messages of the model's input and loss. All other
sends and receives are paired in the order of their starts.
Source: the README of the public traces (OSDI'25 artifact), and inspection of its traces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from megatrain.contracts.errors import DataError
from megatrain_diagnostics.analysis.whatif import kinds
from megatrain_diagnostics.analysis.whatif.lanes import OperationKey

Edges = list[tuple[int, int]]

CLOCK_ERROR_S = 5e-5
"""Limit of the difference between the clocks of a host and its devices."""

_DIRECTIONS = (
    (kinds.FORWARD, kinds.FORWARD_SEND, kinds.FORWARD_RECV, 1),
    (kinds.BACKWARD, kinds.BACKWARD_SEND, kinds.BACKWARD_RECV, -1),
)
"""Compute, its send, its receive, and the direction of the send along the model."""


class Step:
    """One step of one data-parallel rank: operations as numbers, with the times that give their order."""

    def __init__(self, keys: Sequence[OperationKey], start_s: Sequence[float], end_s: Sequence[float]) -> None:
        self.keys, self.start_s, self.end_s = keys, start_s, end_s
        self.num_stages = max(key.stage for key in keys) + 1
        self.num_chunks_of_model = (max(key.chunk for key in keys) + 1) * self.num_stages
        self._by_kind: dict[tuple[int, str], list[int]] = defaultdict(list)
        for number in sorted(range(len(keys)), key=lambda number: keys[number].sequence):
            self._by_kind[keys[number].stage, keys[number].kind].append(number)

    def of(self, stage: int, *names: str) -> list[int]:
        """Return a stage's operations of these kinds, in the order of `names`, then of sequence numbers."""
        return [number for name in names for number in self._by_kind.get((stage, name), [])]

    def by_start(self, numbers: Sequence[int]) -> list[int]:
        return sorted(numbers, key=lambda number: (self.start_s[number], self.keys[number].sequence))


def add_messages(step: Step, edges: Edges, groups: list[list[int]]) -> None:
    """Add the dependencies between messages and computes to `edges`, and pairs of sends and receives to `groups`.

    Raises: DataError if the numbers of messages and computes, or of sends and receives, do not match.
    """
    for compute_kind, send_kind, receive_kind, towards in _DIRECTIONS:
        sends: list[list[int]] = []
        receives: list[list[int]] = []
        for stage in range(step.num_stages):
            computes = step.of(stage, compute_kind)
            posted = step.by_start(step.of(stage, send_kind))
            awaited = step.by_start(step.of(stage, receive_kind))
            edges += pairwise(posted)
            edges += pairwise(awaited)
            sends.append(_sends(step, computes, posted, towards, edges))
            receives.append(_receives(step, computes, awaited, towards, edges))
        for stage in range(step.num_stages):
            peer = (stage + towards) % step.num_stages
            if len(sends[stage]) != len(receives[peer]):
                raise DataError(
                    f"stage {stage} has {len(sends[stage])} {send_kind} and stage {peer} {len(receives[peer])} "
                    f"{receive_kind} in a step; the two counts must be equal"
                )
            groups += ([send, receive] for send, receive in zip(sends[stage], receives[peer], strict=True))


def _sends(step: Step, computes: Sequence[int], posted: Sequence[int], towards: int, edges: Edges) -> list[int]:
    """Make each send wait for its compute; return the sends that have a receiver."""
    first_end = min((step.end_s[number] for number in computes), default=0.0)
    sent = [number for number in posted if step.end_s[number] >= first_end - CLOCK_ERROR_S]
    _check_number(step, computes, sent)
    matched = list(zip(computes, sent, strict=False))
    edges += matched
    return [send for compute, send in matched if _has_peer(step, compute, towards)]


def _receives(step: Step, computes: Sequence[int], awaited: Sequence[int], towards: int, edges: Edges) -> list[int]:
    """Make computes wait for their receives, and receives for the previous compute; return receives with a sender."""
    last_start = max((step.start_s[number] for number in computes), default=0.0)
    received = [number for number in awaited if step.start_s[number] <= last_start + CLOCK_ERROR_S]
    _check_number(step, computes, received)
    first = 1 if len(received) + 1 == len(computes) else 0  # only the first compute may lack a receive
    matched = list(zip(computes[first:], received, strict=False))
    edges += ((receive, compute) for compute, receive in matched)
    edges += ((computes[at - 1], receive) for at, (_, receive) in enumerate(matched, first) if at)
    return [receive for compute, receive in matched if _has_peer(step, compute, -towards)]


def _check_number(step: Step, computes: Sequence[int], messages: Sequence[int]) -> None:
    if len(messages) not in (0, len(computes) - 1, len(computes)):
        raise DataError(
            f"stage {step.keys[messages[0]].stage} has {len(messages)} {step.keys[messages[0]].kind} for "
            f"{len(computes)} computes in a step; expected one for each compute, one fewer, or none"
        )


def _has_peer(step: Step, compute: int, towards: int) -> bool:
    return 0 <= step.keys[compute].model_chunk + towards < step.num_chunks_of_model
