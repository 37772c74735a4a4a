"""Finds the rules that a line could match, by its shape: its letters in lower case, without digits, and with a
space for each other character.

The lines of a log differ mostly in their numbers, so a line with a known shape costs one look-up. A new shape is split
into runs of letters, and each new run is searched for the rules' anchors: one run of letters for each alternative of a
rule. A line can match an alternative only if its shape contains the anchor, so the result is exact.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatrain_job.failures.rule import Rule, Words

_FREQUENT = """
a about access accessed active address after all allocate allocated and another are array at attempt available
background bad barrier batch be been before being bin block blocked broken buffer but by cache call called calling
can cannot check checkpoint clients closed code collective collectives complete completed connect connected
connection controller core could count cpu cuda data dataloader dataset death default detected dev device did died
different disabled disk distributed does down driver due dump during either empty enabled ended entire error errors
event exceeded exception exit exited expected fail failed failure failures false fault file files for found free
from get got gpu gpus grad gradient group had has have header health host idx if illegal image in inf info
information initialized input instance internal invalid is it item iteration job key keys killed last latest launch
limit line link load loaded local loss lost low master match max maximum mem memory metadata might minimum missing
model module more mount mounted must name nan nccl net network no node norm not number object of on one only open
operation or other out output over page parameter peer pending pid pod poll port power process processes rank ranks
raw reached read received record recv remote reset resource result retry rpc running runtime sample samples save
scale send server set shard shared should signal size skipping socket source start started state statement status
step steps stop stopped storage store stream success such system table tar task temperature tensor test text than
the then there this thread time timed timeout timestamp to token tokens torch total train training transport trial
tried try type unable unit until update use used user using valid value values version via wait waiting wandb warn
warning was watch when while will with without work worker workers write written wrong xla yet you your
"""

FREQUENT_WORDS = frozenset(_FREQUENT.split())

_OF_EVERY_LINE = """
batch grad gpu host info iteration loss nccl node norm rank sample samples step time token tokens torch
"""

WORDS_OF_EVERY_LINE = frozenset(_OF_EVERY_LINE.split())
"""Words in most lines of a training log: the least suitable anchors."""


MAX_SHAPES: Final = 8192
MAX_SHAPE_BYTES: Final = 1024
"""Longer shapes are not kept, so that memory does not grow with a log."""
MAX_RUNS: Final = 32768
MAX_RUN_BYTES: Final = 64
"""A longer run of letters is encoded data, not a word of a message."""
BATCH_SHAPES: Final = 128
_MANY_RUNS: Final = 12
"""With more runs than this, it costs less to split a shape than to search it for each run."""

_DIGITS = string.digits.encode()
_TABLE = bytes(
    ord(chr(byte).lower()) if chr(byte) in string.ascii_letters else byte if byte in b"\r\n" else ord(" ")
    for byte in range(256)
)
_RUN = re.compile(r"[a-z]+")

_ALWAYS_WHOLE = frozenset({"nan", "inf"})
"""Runs that must be a whole run of the shape: `inf` is a part of every line of level INFO."""


def shapes_of(block: bytes) -> list[bytes]:
    """Return the shapes of a block's lines."""
    return block.translate(_TABLE, _DIGITS).splitlines()


def anchor_of(words: Words) -> tuple[str, bool]:
    """Return the anchor of one alternative, and whether it is a whole run of a shape.

    The rarest run is chosen, among equally rare ones the longest. If characters other than letters and digits bound a
    run on both sides within its word, it is also a whole run of the shape; other runs may be a part of one.
    """
    runs = [found for word in words for found in _runs(word)]
    return max(runs, key=lambda found: (_rarity(*found), len(found[0])))


def _rarity(run: str, is_whole: bool) -> int:
    if len(run) < 3 or (len(run) == 3 and not is_whole):
        return 0
    if run in WORDS_OF_EVERY_LINE or run in _ALWAYS_WHOLE:
        return 1
    return 2 if run in FREQUENT_WORDS else 3


def _runs(word: str) -> list[tuple[str, bool]]:
    bare = "".join(character for character in word if not character.isdigit())
    if bare != word:  # a digit beside a run may hide that the run continues
        return [(run, False) for run in _RUN.findall(bare)]
    return [
        (found[0], found[0] in _ALWAYS_WHOLE or (found.start() > 0 and found.end() < len(word)))
        for found in _RUN.finditer(word)
    ]


@dataclass(frozen=True, slots=True)
class Target:
    """One alternative of one rule, and the shapes of its words."""

    number: int
    words: Words
    shapes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CandidateRules:
    """The rules that a line could match, each with its remaining alternatives, and the highest weight among them."""

    rules: tuple[tuple[Rule, tuple[Words, ...]], ...]
    most_weight: int


class Anchors:
    """The targets of each anchor, and the search for anchors in a run of letters."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.whole: dict[str, list[Target]] = {}
        self.parts: dict[str, list[Target]] = {}
        for number, rule in enumerate(rules):
            for words in rule.alternatives:
                run, is_whole = anchor_of(words)
                target = Target(number, words, tuple(word.encode().translate(_TABLE, _DIGITS) for word in words))
                (self.whole if is_whole else self.parts).setdefault(run, []).append(target)
        self._any_part = re.compile(_any_of(sorted(self.parts)))

    def of_runs(self, runs: Sequence[bytes]) -> dict[bytes, tuple[Target, ...]]:
        """Return the alternatives that each run leads to. Runs without any are left out."""
        text = b" ".join(runs).decode("ascii")
        leading = self.whole.keys() & set(text.split())
        end = -1
        for found in self._any_part.finditer(text):
            if found.start() > end:
                start = text.rfind(" ", 0, found.start()) + 1
                end = text.find(" ", found.end())
                end = len(text) if end < 0 else end
                leading.add(text[start:end])
        return {run.encode(): self._of_run(run) for run in leading}

    def _of_run(self, run: str) -> tuple[Target, ...]:
        parts = (target for part, targets in self.parts.items() if part in run for target in targets)
        return (*self.whole.get(run, ()), *parts)


def _any_of(words: list[str]) -> str:
    """Return a pattern of one of the sorted words, with common beginnings merged, so that each is tried only once."""
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
    """A bounded cache of the rules that each shape, and each run of letters, can lead to."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._rules = rules
        self._anchors = _anchors(rules)
        self._shapes: dict[bytes, CandidateRules | None] = {}
        self._runs: dict[bytes, tuple[Target, ...]] = {}
        self._dull_runs: set[bytes] = set()

    def interesting(self, shapes: Sequence[bytes]) -> list[tuple[int, CandidateRules]]:
        """Return the lines that could match a rule: their numbers and candidate rules."""
        known = self._shapes
        found = []
        for start in range(0, len(shapes), BATCH_SHAPES):
            batch = shapes[start : start + BATCH_SHAPES]
            unknown = [shape for shape in batch if shape not in known]
            new = self._work_out(unknown) if unknown else {}
            if len(unknown) == len(batch) and not any(new.values()):
                self._keep(new)
                continue
            for number, shape in enumerate(batch, start):
                # new shapes are stored after this loop, because storing them may remove the known ones
                candidates = new[shape] if shape in new else known[shape]
                if candidates is not None:
                    found.append((number, candidates))
            self._keep(new)
        return found

    def _work_out(self, shapes: list[bytes]) -> dict[bytes, CandidateRules | None]:
        """Return the candidates of new shapes.

        All shapes are first searched as one text: few of its runs lead to a rule, and an alternative with a word that
        the text lacks is not tried on single lines.
        """
        text = b"\n".join(shapes)
        runs = set(itertools.filterfalse(self._dull_runs.__contains__, text.split()))
        leading = {run: self._runs[run] for run in runs & self._runs.keys()}
        leading |= self._learn([run for run in runs if run not in leading and len(run) <= MAX_RUN_BYTES])
        live: dict[bytes, tuple[Target, ...]] = {}
        for run, targets in leading.items():
            targets = tuple(target for target in targets if all(part in text for part in target.shapes))
            if targets:
                live[run] = targets
        if not live:
            return dict.fromkeys(shapes)
        if len(live) > _MANY_RUNS:
            return {shape: self._candidates(live.keys() & set(shape.split()), shape, live) for shape in shapes}
        found: dict[bytes, CandidateRules | None] = {}
        for shape in shapes:
            found[shape] = None
            for run in live:
                if run in shape:
                    found[shape] = self._candidates(live.keys() & set(shape.split()), shape, live)
                    break
        return found

    def _keep(self, new: dict[bytes, CandidateRules | None]) -> None:
        if len(self._shapes) + len(new) > MAX_SHAPES:
            self._shapes.clear()
        if max(map(len, new), default=0) > MAX_SHAPE_BYTES:
            new = {shape: candidates for shape, candidates in new.items() if len(shape) <= MAX_SHAPE_BYTES}
        self._shapes.update(new)

    def _candidates(
        self, runs: set[bytes], shape: bytes, live: dict[bytes, tuple[Target, ...]]
    ) -> CandidateRules | None:
        by_rule: dict[int, list[Words]] = {}
        for run in runs:
            for target in live[run]:
                if all(part in shape for part in target.shapes):
                    by_rule.setdefault(target.number, []).append(target.words)
        rules = tuple((self._rules[number], tuple(by_rule[number])) for number in sorted(by_rule))
        return CandidateRules(rules, max(rule.weight for rule, _ in rules)) if rules else None

    def _learn(self, runs: list[bytes]) -> dict[bytes, tuple[Target, ...]]:
        """Process new runs, and return those that lead to a rule."""
        if not runs:
            return {}
        leading = self._anchors.of_runs(runs)
        if len(self._runs) + len(self._dull_runs) + len(runs) > MAX_RUNS:
            self._runs.clear()
            self._dull_runs.clear()
        if len(runs) <= MAX_RUNS:
            self._runs.update(leading)
            self._dull_runs.update(run for run in runs if run not in leading)
        return leading
