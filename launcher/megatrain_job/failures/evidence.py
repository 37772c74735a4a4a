"""One line that a rule matched, and the order of precedence between several."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain_job.failures.rule import Rule
from megatrain_job.failures.verdict import Label, Verdict


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line, its meaning and its weight."""

    rule: Rule
    label: Label
    weight: int
    line_number: int
    line: str
    culprit: str | None
    time_s: float | None
    """Seconds since midnight in the line: enough to order the reports of one failure by the ranks of one job."""

    @property
    def verdict(self) -> Verdict:
        """Return the verdict when this evidence decides."""
        return Verdict(
            label=self.label,
            action=self.rule.action,
            is_cascade=self.rule.is_cascade,
            culprit=self.culprit,
            rule=self.rule.name,
            line=self.line,
        )

    def beats(self, other: Evidence | None) -> bool:
        """Return whether this beats `other`: more weight, or a cause over a consequence, or earlier in the log."""
        if other is None:
            return True
        return (self.weight, not self.rule.is_cascade, -self.line_number) > (
            other.weight,
            not other.rule.is_cascade,
            -other.line_number,
        )
