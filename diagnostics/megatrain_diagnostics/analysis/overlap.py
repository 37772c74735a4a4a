"""How much of each kind of communication compute hides, and how far that is known.

An exchange is exposed while its rank waited for it and did nothing else, and hidden while its rank worked; what is left
passed while the rank waited for something else. When an exchange was over is known where a thread watched it (a lane of
comm/queue.py), or where the rank waited until it was over. Else its span ends when the rank looked, or on a device when
the stream that computes did: what seems hidden is the most that can have been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box_values import RecordFlag
from megatrain.contracts.operations import Operation
from megatrain_diagnostics.analysis.exposure import Exposure
from megatrain_diagnostics.events.tables import Int64, Spans

_HELD_UP = 0.1
"""Part of the transfer time that a host must have waited: less is the time that it takes to look."""
KINDS = tuple(
    operation
    for operation in Operation
    if (operation.is_collective or operation.is_point_to_point) and operation.is_on_device
)


@dataclass(frozen=True, slots=True)
class Overlap:
    """One kind of communication in some windows. Units: ns, summed over the windows."""

    operation: str
    num_windows: int
    count: int
    total_ns: int
    exposed_ns: int
    waiting_ns: int
    """The part of it in which the last peer had not begun."""
    hidden_ns: int
    is_at_most: bool
    """Whether total and hidden are upper bounds, as some of it may have been over before anybody looked."""

    @property
    def elsewhere_ns(self) -> int:
        """Return what passed while its rank waited for something else."""
        return self.total_ns - self.exposed_ns - self.hidden_ns

    @property
    def hidden_percent(self) -> float:
        return 100.0 * self.hidden_ns / self.total_ns if self.total_ns > 0 else 0.0


def overlaps(spans: Spans, exposure: Exposure, ranks: Sequence[int] | None = None) -> tuple[Overlap, ...]:
    """Return each kind of communication in the windows, or in those of some ranks, most exposed first."""
    windows = exposure.windows.rank if ranks is None else exposure.windows.rank[np.isin(exposure.windows.rank, ranks)]
    is_chosen = (exposure.inside_ns > 0) & (spans.duration_ns >= 0)
    if ranks is not None:
        is_chosen &= np.isin(spans.rank, ranks)
    is_vague = (exposure.hidden_ns > 0) & ~knows_end(spans, exposure.exposed_ns, exposure.inside_ns)
    found = []
    for kind in KINDS:
        own = np.flatnonzero(is_chosen & (spans.operation == kind.number))
        if len(own):
            found.append(
                Overlap(
                    operation=kind.value,
                    num_windows=len(windows),
                    count=len(own),
                    total_ns=int(exposure.inside_ns[own].sum()),
                    exposed_ns=int(exposure.exposed_ns[own].sum()),
                    waiting_ns=int(exposure.span_waiting_ns[own].sum()),
                    hidden_ns=int(exposure.hidden_ns[own].sum()),
                    is_at_most=bool(is_vague[own].any()),
                )
            )
    return tuple(sorted(found, key=lambda one: -one.exposed_ns))


def knows_end(spans: Spans, held_up_ns: Int64, lasting_ns: Int64) -> NDArray[np.bool_]:
    """Say of each span whether its end is that of the exchange.

    held_up_ns: how long its host did nothing but wait for it; lasting_ns: of how long a stretch up to its end.
    """
    is_watched = (spans.flags & int(RecordFlag.WATCHED)) != 0
    known: NDArray[np.bool_] = is_watched | (held_up_ns > _HELD_UP * np.maximum(lasting_ns, 0)) | (lasting_ns <= 0)
    return known
