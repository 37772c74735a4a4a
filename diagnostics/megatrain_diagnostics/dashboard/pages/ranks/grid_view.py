"""The picture of all ranks: what is known of each, and who waits for whom. Stages lie beside, replicas below another.

Source: MegaScale fig. 8.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.operations import Operation
from megatrain_diagnostics.analysis.hang_grid import OUTLIER, SILENT, SUSPECT, WAITING
from megatrain_diagnostics.analysis.waiting import Awaited, waiting_arrows
from megatrain_diagnostics.dashboard.answers.binary import pack
from megatrain_diagnostics.dashboard.answers.document import layout_document
from megatrain_diagnostics.dashboard.sources.rank_hosts import hosts_of
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.rank_progress import RankProgress

STATES = (
    ("not heard of", "_"),
    ("in step", ""),
    ("behind", "b"),
    ("waits", WAITING),
    ("says nothing", SILENT),
    ("its stack is not like the others'", OUTLIER),
    ("suspect", SUSPECT),
)
"""Name and letter of each state by its number, the worst last. What is as it should be has no letter."""
_UNHEARD, _IN_STEP, _BEHIND, _WAITS, _SILENT, _OUTLIER, _SUSPECT = range(len(STATES))
_BEHIND_STEPS = 2
"""Ranks of a pipeline tell of a step within moments; sums of two steps are on their way at most."""


@dataclass(frozen=True, slots=True)
class HangPicture:
    """What is known of a hang, as ranks."""

    suspects: Collection[int] = ()
    silent: Collection[int] = ()
    waits_for: Mapping[int, Collection[int]] = field(default_factory=dict)
    outliers: Collection[int] = ()
    in_flight: Mapping[int, str] = field(default_factory=dict)
    """By rank, the name of the operation that it is in."""
    reason: str = ""
    source: str = ""
    """Where this is known from."""


def grid_picture(
    roster: Roster,
    progress: RankProgress,
    *,
    scores: NDArray[np.float32] | None,
    silent: Collection[int],
    hang: HangPicture | None,
) -> bytes:
    """Return the picture as a container of arrays, one entry a rank.

    scores: of stragglers, by rank; None: not known. silent: ranks that said nothing in the newest steps.
    """
    layout, hosts = roster.layout, hosts_of(roster)
    world_size = layout.world_size
    told = HangPicture() if hang is None else hang
    told = replace(told, silent={*told.silent, *silent})
    arrows = waiting_arrows(told.waits_for, told.suspects, told.silent, layout)
    operation = progress.operation.copy()
    number_of = {one.value: one.number for one in Operation}
    for rank, name in told.in_flight.items():
        if 0 <= rank < world_size and name in number_of:
            operation[rank] = number_of[name]
    score = np.full(world_size, np.nan, dtype=np.float32)
    if scores is not None:
        score[: len(scores)] = scores[:world_size]
    newest = int(progress.step.max(initial=-1))
    fields: dict[str, Any] = {
        "round": roster.round,
        "layout": layout_document(layout).model_dump(),
        "states": [{"name": name, "letter": letter} for name, letter in STATES],
        "arrow_kinds": [kind.name.lower() for kind in Awaited],
        "operations": {str(one.number): one.value for one in Operation},
        "hosts": list(hosts.names),
        "newest_step": newest,
        "has_hang": hang is not None,
        "hang_reason": told.reason,
        "hang_source": told.source,
        "has_scores": scores is not None,
    }
    arrays: dict[str, NDArray[Any]] = {
        "state": rank_states(roster, progress, told),
        "step": progress.step.astype(np.int32),
        "operation": operation.astype(np.uint8),
        "score": score,
        "host": hosts.of_rank.astype(np.int32),
        "arrows": np.array([(one.waiting, one.awaited) for one in arrows], dtype=np.int32).reshape(-1, 2),
        "arrow_kind": np.array([one.kind for one in arrows], dtype=np.uint8),
        "arrow_count": np.array([one.num_waiting for one in arrows], dtype=np.int32),
    }
    return pack(fields, arrays)


def rank_states(roster: Roster, progress: RankProgress, hang: HangPicture) -> NDArray[np.uint8]:
    """Return the state of each rank: the worst that is true of it."""
    world_size = roster.layout.world_size
    newest = int(progress.step.max(initial=-1))
    states = np.where(progress.step >= newest - _BEHIND_STEPS, _IN_STEP, _BEHIND)
    has_told = np.zeros(world_size, dtype=bool)
    has_told[[rank for rank in roster.hosts if 0 <= rank < world_size]] = True
    states = np.where(progress.step < 0, np.where(has_told, _BEHIND, _UNHEARD), states)
    if newest < 0:  # no rank has reported a step yet
        states = np.where(has_told, _IN_STEP, _UNHEARD)
    for state, ranks in (
        (_WAITS, hang.waits_for),
        (_SILENT, hang.silent),
        (_OUTLIER, hang.outliers),
        (_SUSPECT, hang.suspects),
    ):
        chosen = [rank for rank in ranks if 0 <= rank < world_size]
        states[chosen] = state
    return states.astype(np.uint8)
