"""The thresholds of a straggler as a document."""

from __future__ import annotations

from megatrain_dashboard.responses.document import ThresholdsDocument
from megatrain_diagnostics.analysis.findings import Thresholds


def thresholds_document(thresholds: Thresholds | None) -> ThresholdsDocument | None:
    """Return the document of the thresholds; None where nothing was judged."""
    if thresholds is None:
        return None
    return ThresholdsDocument(excess=thresholds.excess, score=thresholds.score, num_steps=thresholds.num_steps)
