"""What the processes of a host read through its cache of remote data, from the stored values of its ranks."""

from __future__ import annotations

import numpy as np

from megatrain.contracts.black_box.operations import StepValue
from megatrain_dashboard.api.host_data.cells import cells_of
from megatrain_dashboard.api.host_data.document import DataCacheDocument
from megatrain_diagnostics.events.tables import Float64, Int64, Values, select


def cache_document(ranks: Int64, steps: Int64, values: Values) -> DataCacheDocument | None:
    """Return the use of the cache in these steps; None if no rank has recorded any."""

    def sums(kind: StepValue) -> Float64:
        of_kind = select(values, values.kind == kind)
        found = cells_of(ranks, steps, of_kind, of_kind.value)
        return found[np.isfinite(found).any(axis=1)]

    def mean_growth(kind: StepValue) -> float | None:
        found = sums(kind)
        return float((np.nanmax(found, axis=1) - np.nanmin(found, axis=1)).sum() / num_steps) if num_steps else None

    num_steps, not_stored = int(steps[-1] - steps[0]), sums(StepValue.CACHE_NOT_STORED)
    if not len(not_stored):
        return None
    return DataCacheDocument(
        hit_bytes=mean_growth(StepValue.CACHE_HIT_BYTES),
        fetched_bytes=mean_growth(StepValue.CACHE_FETCHED_BYTES),
        evicted_bytes=mean_growth(StepValue.CACHE_EVICTED_BYTES),
        num_not_stored=int(np.nanmax(not_stored, axis=1).sum()),
    )
