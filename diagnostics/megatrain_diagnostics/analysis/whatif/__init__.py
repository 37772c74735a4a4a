"""Estimates the step time without stragglers, by replaying the dependency graph of a step with other durations.

`make_model` takes the operations of some steps, `what_if` returns all figures, `gain_without` returns the gain of
evicting ranks.
Method: "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), independently implemented.
"""

from __future__ import annotations

from megatrain_diagnostics.analysis.whatif.metrics import WhatIf, gain_without, what_if
from megatrain_diagnostics.analysis.whatif.model import ReplayModel, make_model
from megatrain_diagnostics.analysis.whatif.operations import JobShape, OperationTable

__all__ = ["JobShape", "OperationTable", "ReplayModel", "WhatIf", "gain_without", "make_model", "what_if"]
