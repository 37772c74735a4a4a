"""Measures how much of each kind of communication is overlapped with compute, and how accurate the result is.

An exchange is exposed while its rank only waits for it, and overlapped while its rank works. In the rest of its time
the rank waits for something else. The end of an exchange is known if a thread watched it (a lane of comm/lanes.py), or
if the rank waited until the end. Otherwise its span ends when the rank noticed the end, or on a device when the compute
stream waited for it; then the overlapped time is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import RecordFlag
from megatrain_diagnostics.analysis.exposure import Exposure
from megatrain_diagnostics.events.tables import Int64, Spans

_HELD_UP = 0.1
"""Fraction of the transfer time for which the CPU thread must have waited; a shorter wait may be the check itself."""
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
    """The part of `exposed_ns` before the last peer began."""
    overlapped_ns: int
    is_at_most: bool
    """Whether `total_ns` and `overlapped_ns` are upper bounds: exchanges may have ended before the rank checked."""

    @property
    def elsewhere_ns(self) -> int:
        """Return the time in which the rank waited for something else."""
        return self.total_ns - self.exposed_ns - self.overlapped_ns

    @property
    def overlapped_percent(self) -> float:
        return 100.0 * self.overlapped_ns / self.total_ns if self.total_ns > 0 else 0.0


def overlaps(spans: Spans, exposure: Exposure, ranks: Sequence[int] | None = None) -> tuple[Overlap, ...]:
    """Return each kind of communication in the windows (of `ranks`, if given), the most exposed first."""
    windows = exposure.windows.rank if ranks is None else exposure.windows.rank[np.isin(exposure.windows.rank, ranks)]
    is_chosen = (exposure.inside_ns > 0) & (spans.duration_ns >= 0)
    if ranks is not None:
        is_chosen &= np.isin(spans.rank, ranks)
    is_vague = (exposure.overlapped_ns > 0) & ~has_known_end(spans, exposure.exposed_ns, exposure.inside_ns)
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
                    overlapped_ns=int(exposure.overlapped_ns[own].sum()),
                    is_at_most=bool(is_vague[own].any()),
                )
            )
    return tuple(sorted(found, key=lambda overlap: -overlap.exposed_ns))


def has_known_end(spans: Spans, held_up_ns: Int64, lasting_ns: Int64) -> NDArray[np.bool_]:
    """Return for each span whether its end is the exact end of the exchange.

    held_up_ns: how long the CPU thread only waited for the span; lasting_ns: the time to which the wait is compared.
    """
    is_watched = (spans.flags & int(RecordFlag.WATCHED)) != 0
    known: NDArray[np.bool_] = is_watched | (held_up_ns > _HELD_UP * np.maximum(lasting_ns, 0)) | (lasting_ns <= 0)
    return known
