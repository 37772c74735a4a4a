"""What producers of pictures did for the reads of a host, from the values that its ranks stream in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatrain.contracts.black_box.operations import StepValue
from megatrain_dashboard.api.host_data.cells import history_of
from megatrain_dashboard.api.host_data.document import PicturesDocument, ProducerDocument, ProducerState
from megatrain_diagnostics.events.tables import Float64, Int64, Values, select

_COMBINED: Mapping[StepValue, Any] = {
    StepValue.PRODUCER_PICTURES: np.add,
    StepValue.PRODUCER_FAILURES: np.add,
    StepValue.PRODUCER_WAITING: np.maximum,
    StepValue.PRODUCER_ANSWER_SECONDS: np.maximum,
}
"""How the values of the ranks are combined."""


def pictures_document(
    values: Values, steps: Int64, wait_s: Float64, step_s: float | None, addresses: Sequence[str]
) -> PicturesDocument | None:
    """Return the producers that a host asks; None if it asks none.

    values: rows of the host's ranks in `steps`. wait_s: of the reads of each rank for producers, NaN without a row.
    step_s: mean duration of a step, with the wait for data. addresses: by the number of a producer, as far as known.
    Shapes: wait_s [ranks, steps].
    """
    found_by_kind = [_by_producer(values, kind, steps, combine) for kind, combine in _COMBINED.items()]
    # the record of a step may have been lost in part
    num_producers = min(map(len, found_by_kind))
    if not num_producers:
        return None
    pictures, failures, waiting, answer_s = (found[:num_producers] for found in found_by_kind)
    newest = int(np.flatnonzero((pictures + failures).any(axis=0))[-1]) if (pictures + failures).any() else 0
    waited_s = np.nansum(wait_s, axis=0)
    return PicturesDocument(
        wait_s=float(waited_s.mean()),
        longest_wait_s=float(waited_s.max()),
        producers=tuple(
            ProducerDocument(
                number=number,
                address=addresses[number] if number < len(addresses) else "",
                state=_state(pictures[number, newest], failures[number, newest]),
                pictures_per_s=float(pictures[number].mean() / step_s) if step_s else None,
                answer_s=float(found[found > 0].mean()) if (found > 0).any() else None,
                num_waiting=int(waiting[number].max()),
                num_failed=int(failures[number].sum()),
                pictures_history=history_of(pictures[number], np.mean),
            )
            for number, found in enumerate(answer_s)
        ),
    )


def _state(num_pictures: float, num_failed: float) -> ProducerState:
    if num_pictures:
        return "answers"
    return "failed" if num_failed else "not-asked"


def _by_producer(values: Values, kind: StepValue, steps: Int64, combine: Any) -> Float64:
    """Return a value of each producer and step, combined over the ranks; 0 where there is none.

    A rank records the values of a step in the order of the producers. Shapes: result [producers, steps].
    """
    rows = select(values, (values.kind == kind) & np.isin(values.step, steps))
    rows = select(rows, np.lexsort((rows.sequence, rows.step, rows.rank)))
    is_first = np.ones(len(rows.rank), dtype=bool)
    is_first[1:] = (np.diff(rows.rank) != 0) | (np.diff(rows.step) != 0)
    firsts = np.flatnonzero(is_first)
    number = np.arange(len(is_first)) - firsts[np.cumsum(is_first) - 1]
    found = np.zeros((int(number.max(initial=-1)) + 1, len(steps)))
    combine.at(found, (number, np.searchsorted(steps, rows.step)), rows.value)
    return found
