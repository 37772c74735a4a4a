"""The output of the reporting rank while it trains: step lines, a progress line on a terminal, and metric files.

Only rank 0 constructs a Reporter; no other rank prints or writes metrics.
"""

from megatrain.reporting.report import EvaluationReport, IntervalReport, SourceReport, StepReport, ValidationSetReport
from megatrain.reporting.reporter import Reporter
from megatrain.reporting.sinks import missing_packages

__all__ = [
    "EvaluationReport",
    "IntervalReport",
    "Reporter",
    "SourceReport",
    "StepReport",
    "ValidationSetReport",
    "missing_packages",
]
