"""Keys that hold nothing readable and would be in the way of the driver's next write for ever. Pure.

An unreadable round may have been one that somebody runs: its number is not used again, and a halt says that it is over.
A candidacy without a lease would never expire: it is removed.
"""

from __future__ import annotations

from megatrain.contracts.rounds import Halt
from megatrain_launcher.driver.actions import Decision, DropKey, SkipRound
from megatrain_launcher.driver.state import ClusterState

_UNKNOWN = "\ufffd"
_MAX_AT_ONCE = 32
_MAX_TOLD = 300


def drop_strays(state: ClusterState) -> tuple[DropKey, ...]:
    """Return the removal of candidacies that no lease ends."""
    found = sorted(key for key in state.damaged if key.startswith(f"{state.keys.election}/") and key in state.seen)
    # a name with bytes that are not text is not known exactly
    known = [key for key in found if _UNKNOWN not in key][:_MAX_AT_ONCE]
    return tuple(DropKey(key, state.seen[key].mod_revision) for key in known)


def skip_unreadable(now: float, state: ClusterState) -> Decision | None:
    """Return halts of the rounds after the newest whose records cannot be read; None where there are none.

    Only for a job without a live round that can be read.
    """
    skips: list[SkipRound] = []
    number = state.next_number
    while (key := state.keys.round(number)) in state.damaged and key in state.seen and len(skips) < _MAX_AT_ONCE:
        why = f"round {number} cannot be read, and another one takes its place: {state.damaged[key][:_MAX_TOLD]}"
        halt = Halt(number, why, is_saving=False, created_unix_s=now)
        skips.append(SkipRound(halt, state.seen[key].mod_revision))
        number += 1
    return Decision(tuple(skips), skips[0].halt.reason) if skips else None
