"""Whether storage takes the checkpoints of a round. While it does not, no round is ended that could go on. Pure.

A round that ends costs little because its state is in storage, or comes there. Without that the next round stands on
the memory of the hosts alone, and where checkpoints cannot be read either, it cannot begin: the job would be over.
"""

from __future__ import annotations

from megatrain.contracts.rounds import Round
from megatrain.contracts.texts import count_text
from megatrain_launcher.driver.incidents import statuses_in
from megatrain_launcher.driver.state import ClusterState


def unsaved(state: ClusterState, round_: Round) -> str:
    """Return what storage has not taken of a round and why; empty where the newest snapshot is a checkpoint, or where
    none was taken yet."""
    told = [(status.host, status.saves) for status in statuses_in(state, round_) if status.saves is not None]
    host, saves = max(told, key=lambda one: one[1].num_failed, default=("", None))
    if saves is None or not saves.num_failed:
        return ""
    missing = (
        "the last checkpoint" if saves.num_failed == 1 else f"the last {count_text(saves.num_failed, 'checkpoint')}"
    )
    return f"storage has not taken {missing} ({host}): {saves.error}"
