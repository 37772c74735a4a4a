"""Unreadable keys that would block the driver's next write forever. Pure.

Hosts may be running an unreadable round. The driver does not reuse its number, and writes a halt to end it. A candidacy
without a lease would never expire, so the driver removes it.
"""

from __future__ import annotations

from megatrain.contracts.records.rounds import Halt
from megatrain_launcher.driver.actions import Decision, DropKey, SkipRound
from megatrain_launcher.driver.state import ClusterState

_UNKNOWN = "\ufffd"
_MAX_AT_ONCE = 32
_MAX_CHARS = 300


def drop_candidacies_without_lease(state: ClusterState) -> tuple[DropKey, ...]:
    """Return the removal of candidacies that have no lease."""
    found = sorted(key for key in state.damaged if key.startswith(f"{state.keys.election}/") and key in state.seen)
    # a name with bytes that are not text is not known exactly, so its key cannot be addressed
    known = [key for key in found if _UNKNOWN not in key][:_MAX_AT_ONCE]
    return tuple(DropKey(key, state.seen[key].mod_revision) for key in known)


def skip_unreadable(now: float, state: ClusterState) -> Decision | None:
    """Return halts of unreadable rounds newer than the newest readable one; None if there are none.

    Only for a job without a readable live round.
    """
    skips: list[SkipRound] = []
    number = state.next_number
    while (key := state.keys.round(number)) in state.damaged and key in state.seen and len(skips) < _MAX_AT_ONCE:
        why = f"round {number} cannot be read, and is replaced by another one: {state.damaged[key][:_MAX_CHARS]}"
        halt = Halt(number, why, is_saving=False, created_unix_s=now)
        skips.append(SkipRound(halt, state.seen[key].mod_revision))
        number += 1
    return Decision(tuple(skips), skips[0].halt.reason) if skips else None
