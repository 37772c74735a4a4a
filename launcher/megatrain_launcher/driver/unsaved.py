"""Whether storage accepts the checkpoints of a round. While it does not, no round that could continue is ended. Pure.

Ending a round costs little because its state is in storage, or will be. If storage fails, the next round depends on the
hosts' memory only; if checkpoints cannot be read either, it cannot begin, and the job is over.
"""

from __future__ import annotations

from megatrain.contracts.records.rounds import Round
from megatrain.formatting.quantities import count_text
from megatrain_launcher.driver.incidents import statuses_in
from megatrain_launcher.driver.state import ClusterState


def unsaved(state: ClusterState, round_: Round) -> str:
    """Return what storage has not accepted of a round and why; empty if the newest snapshot is a checkpoint, or if
    there was no snapshot yet.
    """
    host_saves = [(status.host, status.saves) for status in statuses_in(state, round_) if status.saves is not None]
    host, saves = max(host_saves, key=lambda one: one[1].num_failed, default=("", None))
    if saves is None or not saves.num_failed:
        return ""
    missing = (
        "the last checkpoint" if saves.num_failed == 1 else f"the last {count_text(saves.num_failed, 'checkpoint')}"
    )
    return f"storage has not taken {missing} ({host}): {saves.error}"
