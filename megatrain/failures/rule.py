"""One rule: the words that a line must hold, and what the line then says.

Words come first because searching for them is fast, and because they lead from a line's letters to the few rules that
it could match (`shapes`). Patterns do the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatrain.failures.lines import message_start
from megatrain.failures.verdict import ACTIONS, Action, Label

Words = tuple[str, ...]

CULPRIT_KINDS = ("host", "rank", "gpu", "peer")


@dataclass(frozen=True, slots=True)
class Rule:
    """A line matches when it holds all words of one alternative, and the pattern where there is one."""

    name: str
    label: Label
    weight: int
    """Rules of more weight decide. See `weights`."""
    alternatives: tuple[Words, ...]
    """Lower-case words."""
    pattern: re.Pattern[str] | None = None
    """Must be found in the line, whose letters are small."""
    unless: re.Pattern[str] | None = None
    """Must not be found in it."""
    culprit: re.Pattern[str] | None = None
    """Its groups `host`, `rank`, `gpu` and `peer` name the culprit, in the line as it was."""
    is_cascade: bool = False
    action: Action = Action.NONE
    is_silencer: bool = False
    """The line is this, whatever other rules see in it."""
    names_own_rank: bool = True
    """Whether the rank that wrote the line is the culprit where the pattern names no rank."""
    is_at_start: bool = False
    """The pattern is looked for where the message begins, after what launchers and loggers put before it."""
    is_fallback: bool = False
    """Other rules that match the same line know better."""
    is_family: bool = False
    """The rule knows a kind of failure and no message: rules that know the line's message know better."""
    is_context: bool = False
    """The line is no sign of failure; it tells something about the lines that follow."""

    def __post_init__(self) -> None:
        for words in self.alternatives or ((),):
            if not words or any(word != word.lower() for word in words) or not any(map(_has_letter, words)):
                raise ValueError(f"rule {self.name}: {words!r} must be words of lower case, one of them with a letter")

    def matches(self, text: str, lower: str, alternatives: tuple[Words, ...]) -> bool:
        """Say whether the line matches by one of `alternatives`; `lower` is the line with its ASCII letters small."""
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
        """What decides between rules that match one line; `weight` decides between lines."""
        return self.is_silencer, not self.is_fallback, not self.is_family, self.weight

    def named(self, text: str) -> dict[str, str]:
        """Return who the line names, by kind: host, rank, gpu, peer."""
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
    action: Action | None = None,
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
        action=ACTIONS[label] if action is None else action,
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
    """Return a pattern for lines in lower case: it is found several times faster than one that ignores case."""
    return re.sub(r"\\.|\(\?P|[A-Z]", lambda found: found[0].lower() if len(found[0]) == 1 else found[0], pattern)
