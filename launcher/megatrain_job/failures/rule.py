"""One rule: the words that a line must contain, the meaning of the line, and its weight among other lines.

Words are compared before patterns, because the search for them is fast, and because they select the few rules that a
line could match (`shapes`).

The heaviest line decides; among equal weights, a cause before a consequence, then the first in the log. The weights
follow causation: a broken GPU causes a CUDA error, which causes an exception, then a peer's timeout, then a lost
connection, then an abort. A consequence never outweighs a possible cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from megatrain_job.failures.lines import message_start
from megatrain_job.failures.verdict import LABELS, FailureAction, Label, Verdict

HARDWARE: Final = 95
"""The hardware itself, or the kernel, reports that hardware is broken."""
HOST: Final = 90
"""The host's software is broken, or its memory was exhausted."""
ENDED_BY_OTHERS: Final = 85
"""A scheduler reports that it ended the job."""
SPECIFIC: Final = 80
"""A message with one meaning: this allocation, this file, this check failed."""
DEVICE_FAULT: Final = 75
"""The program or the GPU did something illegal: a later call raises the exception."""
LINK: Final = 70
"""The network's own message about a link or a path."""
CRASH: Final = 65
"""The process died of a signal that it caused, such as a segmentation fault."""
EXCEPTION: Final = 60
"""A Python exception that no other rule matches."""
TIMEOUT: Final = 50
"""A collective did not end in time: another rank is the cause."""
LOST_PEER: Final = 45
"""The peer closed a connection: a cause only if no other line explains the failure."""
ABORT: Final = 40
"""The process aborted after an earlier message."""
EXIT_CODE: Final = 35
"""A launcher's summary of how a process ended."""
SIGNAL_FROM_OUTSIDE: Final = 30
"""A request to stop, from a person or another program."""
NOISE: Final = 10
"""A line that resembles a failure, but is not one."""

ROOT_BONUS: Final = 4
"""Added to the weight of torch's "Root Cause" entry: it then outweighs exit codes, but not a program's messages."""


Words = tuple[str, ...]

CULPRIT_KINDS = ("host", "rank", "gpu", "peer")


@dataclass(frozen=True, slots=True)
class Rule:
    """A line matches if it contains all words of one alternative, `pattern` matches, and `unless` does not."""

    name: str
    label: Label
    weight: int
    """The line with the highest weight decides."""
    alternatives: tuple[Words, ...]
    """Lower-case words."""
    pattern: re.Pattern[str] | None = None
    """Must match in the line in lower case."""
    unless: re.Pattern[str] | None = None
    """Must not match in the line in lower case."""
    culprit: re.Pattern[str] | None = None
    """Its groups `host`, `rank`, `gpu` and `peer` name the culprit, in the line's original case."""
    is_cascade: bool = False
    action: FailureAction = FailureAction.NONE
    is_silencer: bool = False
    """This rule decides the line even if other rules match it."""
    names_own_rank: bool = True
    """Whether the rank that wrote the line is the culprit if the line names none."""
    is_at_start: bool = False
    """The pattern is matched where the message begins, after the prefixes of launchers and loggers."""
    is_fallback: bool = False
    """Other rules that match the same line take precedence."""
    is_family: bool = False
    """The rule describes a kind of failure, not one message: rules for the line's message take precedence."""
    is_context: bool = False
    """The line is not a sign of a failure: it gives information about later lines."""

    def __post_init__(self) -> None:
        for words in self.alternatives or ((),):
            if not words or any(word != word.lower() for word in words) or not any(map(_has_letter, words)):
                raise ValueError(f"rule {self.name}: {words!r} must be words in lower case, one of them with a letter")

    def matches(self, text: str, lower: str, alternatives: tuple[Words, ...]) -> bool:
        """Return whether the line matches by one of `alternatives`; `lower` is the line with its ASCII letters in lower
        case.
        """
        if not any(all(word in lower for word in words) for words in alternatives):
            return False
        if self.unless is not None and self.unless.search(lower):
            return False
        if self.pattern is None:
            return True
        if self.is_at_start:
            return self.pattern.match(lower, message_start(text)) is not None
        return self.pattern.search(lower) is not None

    @property
    def precedence(self) -> tuple[bool, bool, bool, int]:
        """The order among rules that match one line; the order among lines is by `weight`."""
        return self.is_silencer, not self.is_fallback, not self.is_family, self.weight

    def named(self, text: str) -> dict[str, str]:
        """Return the culprit that the line names, by kind: host, rank, gpu, peer."""
        found = self.culprit.search(text) if self.culprit is not None else None
        # names of groups are unique in a pattern, so further groups of a kind have a number at the end
        pairs = ((group.rstrip("0123456789"), name) for group, name in found.groupdict().items()) if found else ()
        return {kind: name for kind, name in pairs if name and kind in CULPRIT_KINDS}


def rule(
    name: str,
    label: Label,
    weight: int,
    *alternatives: str,
    pattern: str = "",
    unless: str = "",
    culprit: str = "",
    action: FailureAction | None = None,
    **flags: bool,
) -> Rule:
    """Return a rule.

    alternatives: words joined by ` & `. action: by default that of the label. flags: the truth values of a `Rule`.
    """
    return Rule(
        name=name,
        label=label,
        weight=weight,
        alternatives=tuple(tuple(alternative.split(" & ")) for alternative in alternatives),
        pattern=_compiled(_small(pattern)),
        unless=_compiled(_small(unless)),
        culprit=_compiled(culprit or (pattern if "(?P<" in pattern else ""), re.IGNORECASE),
        action=LABELS[label].action if action is None else action,
        **flags,
    )


def _has_letter(word: str) -> bool:
    return any(character.isalpha() for character in word)


def _compiled(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str] | None:
    return re.compile(pattern, flags) if pattern else None


def _small(pattern: str) -> str:
    """Return a pattern for lines in lower case: matching it is several times faster than ignoring case."""
    return re.sub(r"\\.|\(\?P|[A-Z]", lambda found: found[0].lower() if len(found[0]) == 1 else found[0], pattern)


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
    """Time of day in the line, in seconds since midnight, to order the ranks' reports of one failure; None: no time."""

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
