"""One rule: the words that a line must contain, and the meaning of the line.

Words come first because searching for them is fast, and because they lead from a line's letters to the few rules that
it could match (`shapes`). Patterns do the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatrain_job.failures.lines import message_start
from megatrain_job.failures.verdict import LABELS, FailureAction, Label

Words = tuple[str, ...]

CULPRIT_KINDS = ("host", "rank", "gpu", "peer")


@dataclass(frozen=True, slots=True)
class Rule:
    """A line matches if it contains all words of one alternative, and the pattern if there is one."""

    name: str
    label: Label
    weight: int
    """Rules of more weight decide. See `weights`."""
    alternatives: tuple[Words, ...]
    """Lower-case words."""
    pattern: re.Pattern[str] | None = None
    """Must be found in the line in lower case."""
    unless: re.Pattern[str] | None = None
    """Must not be found in it."""
    culprit: re.Pattern[str] | None = None
    """Its groups `host`, `rank`, `gpu` and `peer` name the culprit, in the line's original case."""
    is_cascade: bool = False
    action: FailureAction = FailureAction.NONE
    is_silencer: bool = False
    """This rule decides the line, whatever other rules match it."""
    names_own_rank: bool = True
    """Whether the rank that wrote the line is the culprit if the pattern names no rank."""
    is_at_start: bool = False
    """The pattern is matched where the message begins, after the prefixes of launchers and loggers."""
    is_fallback: bool = False
    """Other rules that match the same line take precedence."""
    is_family: bool = False
    """The rule describes a kind of failure and no message: rules for the line's message take precedence."""
    is_context: bool = False
    """The line is no sign of failure; it gives information about the lines that follow."""

    def __post_init__(self) -> None:
        for words in self.alternatives or ((),):
            if not words or any(word != word.lower() for word in words) or not any(map(_has_letter, words)):
                raise ValueError(f"rule {self.name}: {words!r} must be words of lower case, one of them with a letter")

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
        """The order of rules that match one line; `weight` orders lines."""
        return self.is_silencer, not self.is_fallback, not self.is_family, self.weight

    def named(self, text: str) -> dict[str, str]:
        """Return the culprit that the line names, by kind: host, rank, gpu, peer."""
        found = self.culprit.search(text) if self.culprit is not None else None
        # a group that occurs twice has a number in its name
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
    is_cascade: bool = False,
    is_silencer: bool = False,
    names_own_rank: bool = True,
    is_at_start: bool = False,
    is_fallback: bool = False,
    is_family: bool = False,
    is_context: bool = False,
) -> Rule:
    """Return a rule. Words of an alternative are joined by ` & `; the action is the label's unless given."""
    return Rule(
        name=name,
        label=label,
        weight=weight,
        alternatives=tuple(tuple(alternative.split(" & ")) for alternative in alternatives),
        pattern=_compiled(_small(pattern)),
        unless=_compiled(_small(unless)),
        culprit=_compiled(culprit or (pattern if "(?P<" in pattern else ""), re.IGNORECASE),
        is_cascade=is_cascade,
        action=LABELS[label].action if action is None else action,
        is_silencer=is_silencer,
        names_own_rank=names_own_rank,
        is_at_start=is_at_start,
        is_fallback=is_fallback,
        is_family=is_family,
        is_context=is_context,
    )


def _has_letter(word: str) -> bool:
    return any(character.isalpha() for character in word)


def _compiled(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str] | None:
    return re.compile(pattern, flags) if pattern else None


def _small(pattern: str) -> str:
    """Return a pattern for lines in lower case: matching it is several times faster than ignoring case."""
    return re.sub(r"\\.|\(\?P|[A-Z]", lambda found: found[0].lower() if len(found[0]) == 1 else found[0], pattern)
