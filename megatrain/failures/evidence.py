"""One line that a rule matched, and what decides between several."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.failures.rule import Rule
from megatrain.failures.verdict import Label, Verdict


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line, what it says, and how much that weighs."""

    rule: Rule
    label: Label
    weight: int
    line_number: int
    line: str
    culprit: str | None
    time_s: float | None
    """Seconds since midnight that the line names: enough to order what ranks of one job say about one failure."""

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
        """Say whether this decides over `other`: more weight, or a cause over a consequence, or earlier in the log."""
        if other is None:
            return True
        return (self.weight, not self.rule.is_cascade, -self.line_number) > (
            other.weight,
            not other.rule.is_cascade,
            -other.line_number,
        )
