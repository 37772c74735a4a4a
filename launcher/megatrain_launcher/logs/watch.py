"""What the log of one rank in one round says of a failure, as the log grows."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from megatrain_job.failures.classifier import LogClassifier
from megatrain_job.failures.rule import HOST
from megatrain_job.failures.verdict import Label, Verdict

ALARM_WEIGHT: Final = HOST
"""A line of this weight shows that the host is broken, even if the process still runs."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LogWatch:
    """Reads one rank's log: `feed` it, and `finish` when its process has ended."""

    rank: int
    problem: str = ""
    """Why this log is no longer read; empty if it is."""
    _classifier: LogClassifier = field(default_factory=LogClassifier)
    _has_alarmed: bool = False

    def feed(self, chunk: bytes) -> Verdict | None:
        """Read more of the log. Return the verdict, once, when a line says that this host is broken."""
        if self.problem:
            return None
        try:
            self._classifier.feed(chunk)
        except Exception as error:
            # Training must continue. The same log may raise the error again, so it is no longer read.
            _logger.exception("the log of rank %d can no longer be classified", self.rank)
            self.problem = f"the log of rank {self.rank} is not classified ({type(error).__name__}: {error})"
            return None
        best = self._classifier.best
        if self._has_alarmed or best is None or best.weight < ALARM_WEIGHT:
            return None
        self._has_alarmed = True
        return self.verdict

    def finish(self) -> Verdict | None:
        """Read the last line, even without a newline, and return the verdict."""
        if not self.problem:
            self._classifier.finish()
        return self.verdict

    @property
    def verdict(self) -> Verdict | None:
        """The verdict so far; None while the log names no failure."""
        found = self._classifier.verdict
        return None if found.label is Label.BENIGN else found
