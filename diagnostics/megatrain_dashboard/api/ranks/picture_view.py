"""The picture of all ranks: the state of each, and which rank waits for which.

Stages lie side by side, and replicas lie below each other. Source: MegaScale fig. 8.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import Operation
from megatrain_dashboard.responses.binary import pack
from megatrain_dashboard.responses.document import layout_document
from megatrain_dashboard.sources.hosts import hosts_of
from megatrain_diagnostics.analysis.hang_grid import OUTLIER, SILENT, SUSPECT, WAITING
from megatrain_diagnostics.analysis.waiting import Awaited, waiting_arrows
from megatrain_diagnostics.events.roster import Roster
from megatrain_diagnostics.store.rank_progress import ProgressByRank

STATES = (
    ("no report", "_"),
    ("in step", ""),
    ("behind", "b"),
    ("waits", WAITING),
    ("silent", SILENT),
    ("stack differs from the others", OUTLIER),
    ("suspect", SUSPECT),
)
"""Name and letter of each state by its number, the worst last. The normal state has no letter."""
_NO_REPORT, _IN_STEP, _BEHIND, _WAITS, _SILENT, _OUTLIER, _SUSPECT = range(len(STATES))
_BEHIND_STEPS = 2
"""Ranks of a pipeline report a step within moments of each other, so the sums of at most two steps may be missing."""


@dataclass(frozen=True, slots=True)
class HangPicture:
    """The ranks that are involved in a hang."""

    suspects: Collection[int] = ()
    silent: Collection[int] = ()
    waits_for: Mapping[int, Collection[int]] = field(default_factory=dict)
    outliers: Collection[int] = ()
    in_flight: Mapping[int, str] = field(default_factory=dict)
    """By rank, the name of the operation that it is in."""
    reason: str = ""
    source: str = ""
    """The source of this evidence."""


def ranks_picture(
    roster: Roster,
    progress: ProgressByRank,
    *,
    scores: NDArray[np.float32] | None,
    silent: Collection[int],
    hang: HangPicture | None,
) -> bytes:
    """Return the picture as a container of arrays, with one entry for each rank.

    scores: straggler scores by rank; None: not known. silent: ranks that reported nothing in the newest steps.
    """
    layout, hosts = roster.layout, hosts_of(roster)
    world_size = layout.world_size
    picture = HangPicture() if hang is None else hang
    picture = replace(picture, silent={*picture.silent, *silent})
    arrows = waiting_arrows(picture.waits_for, picture.suspects, picture.silent, layout)
    operation = progress.operation.copy()
    number_of = {operation.value: operation.number for operation in Operation}
    for rank, name in picture.in_flight.items():
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
        "operations": {str(operation.number): operation.value for operation in Operation},
        "hosts": list(hosts.names),
        "newest_step": newest,
        "has_hang": hang is not None,
        "hang_reason": picture.reason,
        "hang_source": picture.source,
        "has_scores": scores is not None,
    }
    arrays: dict[str, NDArray[Any]] = {
        "state": rank_states(roster, progress, picture),
        "step": progress.step.astype(np.int32),
        "operation": operation.astype(np.uint8),
        "score": score,
        "host": hosts.of_rank.astype(np.int32),
        "arrows": np.array([(arrow.waiting, arrow.awaited) for arrow in arrows], dtype=np.int32).reshape(-1, 2),
        "arrow_kind": np.array([arrow.kind for arrow in arrows], dtype=np.uint8),
        "arrow_count": np.array([arrow.num_waiting for arrow in arrows], dtype=np.int32),
    }
    return pack(fields, arrays)


def rank_states(roster: Roster, progress: ProgressByRank, hang: HangPicture) -> NDArray[np.uint8]:
    """Return the state of each rank: the worst one that applies to it."""
    world_size = roster.layout.world_size
    newest = int(progress.step.max(initial=-1))
    states = np.where(progress.step >= newest - _BEHIND_STEPS, _IN_STEP, _BEHIND)
    has_reported = np.zeros(world_size, dtype=bool)
    has_reported[[rank for rank in roster.hosts if 0 <= rank < world_size]] = True
    states = np.where(progress.step < 0, np.where(has_reported, _BEHIND, _NO_REPORT), states)
    if newest < 0:  # no rank has reported a step yet
        states = np.where(has_reported, _IN_STEP, _NO_REPORT)
    for state, ranks in (
        (_WAITS, hang.waits_for),
        (_SILENT, hang.silent),
        (_OUTLIER, hang.outliers),
        (_SUSPECT, hang.suspects),
    ):
        chosen = [rank for rank in ranks if 0 <= rank < world_size]
        states[chosen] = state
    return states.astype(np.uint8)
