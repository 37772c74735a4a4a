"""Which rules a line could match, by its shape: its letters, small, with all digits deleted.

The one idea: the lines of a log differ in their numbers mostly, so a line whose shape is known costs one look-up. A
shape that is new is split into runs of letters, and a run that is new is searched for the rules' anchors. No anchor
holds anything but letters, so a line never matches a rule that its shape does not lead to: the result is exact.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from megatrain.failures.frequent_words import FREQUENT_WORDS
from megatrain.failures.rule import Rule, Words

MAX_SHAPES: Final = 8192
MAX_SHAPE_BYTES: Final = 1024
"""Shapes beyond are worked out every time: nothing in memory grows with a log."""
MAX_RUNS: Final = 32768
MAX_RUN_BYTES: Final = 64
"""More letters in a row are no word of any message, but encoded bytes."""

_DIGITS = string.digits.encode()
_TABLE = bytes(
    ord(chr(byte).lower()) if chr(byte) in string.ascii_letters else byte if byte in b"\r\n" else ord(" ")
    for byte in range(256)
)
_RUN = re.compile(r"[a-z]+")

_ALWAYS_WHOLE = frozenset({"nan", "inf"})
"""Runs that mean nothing as a part of another: `inf` is in every line of level INFO."""


def shapes_of(block: bytes) -> list[bytes]:
    """Return the shapes of a block's lines."""
    return block.translate(_TABLE, _DIGITS).splitlines()


def anchor_of(words: Words) -> tuple[str, bool]:
    """Return the run of letters by which one alternative is found, and whether it stands alone in a shape.

    The rarest run is chosen, if not the longest. A run that other characters than letters and digits bound on both
    sides within its word is a whole run of the shape, too: others may be a part of one.
    """
    runs = [found for word in words for found in _runs(word)]
    return max(runs, key=lambda found: (_rarity(*found), len(found[0])))


def _rarity(run: str, is_whole: bool) -> int:
    if len(run) < 3 or (len(run) == 3 and not is_whole):
        return 0
    return 1 if run in FREQUENT_WORDS else 2


def _runs(word: str) -> list[tuple[str, bool]]:
    bare = "".join(character for character in word if not character.isdigit())
    if bare != word:  # a digit beside a run may hide that the run goes on
        return [(run, False) for run in _RUN.findall(bare)]
    return [
        (found[0], found[0] in _ALWAYS_WHOLE or (found.start() > 0 and found.end() < len(word)))
        for found in _RUN.finditer(word)
    ]


@dataclass(frozen=True, slots=True)
class Target:
    """One alternative of one rule, and what a shape holds when a line holds its words."""

    number: int
    words: Words
    shapes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The rules that a line could match, each with the alternatives that are left, and the most that one weighs."""

    rules: tuple[tuple[Rule, tuple[Words, ...]], ...]
    most_weight: int


class Anchors:
    """Where each anchor leads to, and what finds the anchors in a run of letters."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.whole: dict[str, list[Target]] = {}
        self.parts: dict[str, list[Target]] = {}
        for number, rule in enumerate(rules):
            for words in rule.alternatives:
                run, is_whole = anchor_of(words)
                target = Target(number, words, tuple(word.encode().translate(_TABLE, _DIGITS) for word in words))
                (self.whole if is_whole else self.parts).setdefault(run, []).append(target)
        self._any_part = re.compile(_any_of(sorted(self.parts)))

    def in_run(self, run: str) -> tuple[Target, ...]:
        """Return the alternatives that a run leads to."""
        found = list(self.whole.get(run, ()))
        if self._any_part.search(run):
            found += [target for part, targets in self.parts.items() if part in run for target in targets]
        return tuple(found)


def _any_of(words: list[str]) -> str:
    """Return a pattern of one of the sorted words that tries no common beginning twice."""
    if "" in words:
        return ""
    branches = []
    for letter, group in itertools.groupby(words, key=lambda word: word[0]):
        branches.append(letter + _any_of([word[1:] for word in group]))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


@functools.cache
def _anchors(rules: tuple[Rule, ...]) -> Anchors:
    return Anchors(rules)


class ShapeIndex:
    """Remembers for shapes and runs of letters which rules they can lead to. Bounded."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._anchors = _anchors(rules)
        self._shapes: dict[bytes, Candidates | None] = {}
        self._runs: dict[bytes, tuple[Target, ...]] = {}
        self._dull_runs: set[bytes] = set()

    def interesting(self, shapes: Iterable[bytes]) -> list[tuple[int, Candidates]]:
        """Return number and candidates of the lines that could match a rule."""
        known = self._shapes
        found = []
        for number, shape in enumerate(shapes):
            candidates = known[shape] if shape in known else self._work_out(shape)
            if candidates is not None:
                found.append((number, candidates))
        return found

    def _work_out(self, shape: bytes) -> Candidates | None:
        runs = set(shape.split()) - self._dull_runs
        candidates = self._candidates(runs, shape) if runs else None
        if len(shape) <= MAX_SHAPE_BYTES:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = candidates
        return candidates

    def _candidates(self, runs: set[bytes], shape: bytes) -> Candidates | None:
        by_rule: dict[int, list[Words]] = {}
        for run in runs:
            targets = self._runs.get(run)
            if targets is None:
                targets = self._look_up(run)
            for target in targets:
                if all(part in shape for part in target.shapes):
                    by_rule.setdefault(target.number, []).append(target.words)
        rules = tuple((self._rules[number], tuple(by_rule[number])) for number in sorted(by_rule))
        return Candidates(rules, max(rule.weight for rule, _ in rules)) if rules else None

    def _look_up(self, run: bytes) -> tuple[Target, ...]:
        if len(run) > MAX_RUN_BYTES:
            return ()
        targets = self._anchors.in_run(run.decode("ascii"))
        if len(self._runs) + len(self._dull_runs) >= MAX_RUNS:
            self._runs.clear()
            self._dull_runs.clear()
        if targets:
            self._runs[run] = targets
        else:
            self._dull_runs.add(run)
        return targets
