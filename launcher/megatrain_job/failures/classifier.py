"""Classifies a log as it arrives. Memory is bounded. A chunk may end anywhere, also inside a line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from megatrain_job.failures.context_lines import FailureTable, Frames, WatchdogSequences
from megatrain_job.failures.lines import LineCutter, host_of_line, rank_of_line
from megatrain_job.failures.rule import ABORT, CULPRIT_KINDS, ROOT_BONUS, Evidence, Rule
from megatrain_job.failures.rules import context
from megatrain_job.failures.rules.table import ALL_RULES
from megatrain_job.failures.shapes import CandidateRules, ShapeIndex, shapes_of
from megatrain_job.failures.verdict import NO_FAILURE, Verdict

MAX_SHOWN: Final = 400
"""A verdict quotes at most this many characters of the deciding line."""
MAX_BLOCK_BYTES: Final = 1 << 20
"""A larger chunk is read in pieces of this size."""

_CLOCK = re.compile(r"(?<![\d:])([01]\d|2[0-3]):([0-5]\d):([0-5]\d(?:[.,]\d{1,9})?)")


@dataclass(slots=True)
class LogClassifier:
    """Reads one log: call `feed` with its chunks, `finish` at its end; `verdict` is the verdict so far."""

    best: Evidence | None = None
    """The line that determines the verdict so far."""
    sequences: WatchdogSequences = field(default_factory=WatchdogSequences)
    """Sequence numbers that the log names, for finding a hang's culprit."""
    _index: ShapeIndex = field(default_factory=lambda: ShapeIndex(ALL_RULES))
    _cutter: LineCutter = field(default_factory=LineCutter)
    _table: FailureTable = field(default_factory=FailureTable)
    _frames: Frames = field(default_factory=Frames)
    _num_lines: int = 0
    _least_weight: int = -1

    def feed(self, chunk: bytes | str) -> Verdict:
        """Read more of the log and return the verdict on its complete lines so far."""
        data = chunk.encode("utf-8", "replace") if isinstance(chunk, str) else chunk
        for start in range(0, len(data), MAX_BLOCK_BYTES):
            self._read(self._cutter.feed(data[start : start + MAX_BLOCK_BYTES]))
        return self.verdict

    def finish(self) -> Verdict:
        """Read the last line, even without a newline, and return the verdict."""
        self._read(self._cutter.finish())
        return self.verdict

    @property
    def verdict(self) -> Verdict:
        """The verdict so far."""
        return NO_FAILURE if self.best is None else self.best.verdict

    def _read(self, block: bytes) -> None:
        shapes = shapes_of(block)
        interesting = self._index.interesting(shapes)
        if interesting:
            lines = block.splitlines()
            for number, candidates in interesting:
                if candidates.most_weight > self._least_weight:
                    self._classify(lines[number], candidates, self._num_lines + number)
        self._num_lines += len(shapes)

    def _classify(self, raw: bytes, candidates: CandidateRules, number: int) -> None:
        line = raw.decode("utf-8", "replace")
        lower = raw.lower().decode("utf-8", "replace")  # lowered as bytes, so that positions in both texts agree
        decided: Rule | None = None
        for rule, alternatives in candidates.rules:
            if not rule.matches(line, lower, alternatives):
                continue
            if rule.is_context:
                self._learn(rule, line)
            elif decided is None or rule.precedence > decided.precedence:
                decided = rule
        if decided is not None:
            self._weigh(decided, line, number)

    def _learn(self, rule: Rule, line: str) -> None:
        if rule.name == context.FRAME:
            self._frames.see(rank_of_line(line), line)
        elif rule.name == context.IGNORED:
            self._frames.ignore(rank_of_line(line))
        elif rule.name == context.SEQUENCE:
            self.sequences.see(line)
        else:
            self._table.see(line)

    def _weigh(self, rule: Rule, line: str, number: int) -> None:
        if self._frames.ends_ignored(rank_of_line(line), line):
            return
        label, weight = rule.label, rule.weight
        if rule.name == "python-exception":
            label = self._frames.label_of(rank_of_line(line), line) or label
        named = rule.named(line)
        entry = self._table.entry_for(line)
        if entry is not None:
            weight += entry.extra_weight
            named = named or entry.named
        if self.best is not None and weight < self.best.weight:
            return
        evidence = Evidence(rule, label, weight, number, line[:MAX_SHOWN], culprit(rule, line, named), clock_s(line))
        if evidence.beats(self.best):
            self.best = evidence
            # lines that cannot weigh more are skipped, so most lines of a flood are not matched
            bonus = ROOT_BONUS if weight <= ABORT + ROOT_BONUS else 0
            self._least_weight = weight - bonus - rule.is_cascade


def culprit(rule: Rule, line: str, named: dict[str, str]) -> str | None:
    """Return the culprit that a line names, or its writer if the rule makes the writer the culprit."""
    if not named and rule.names_own_rank and not rule.is_cascade:
        rank = rank_of_line(line)
        named = {"rank": rank} if rank is not None else {}
    host = None if "host" in named or "peer" in named or rule.is_cascade else host_of_line(line)
    if host is not None and (rule.names_own_rank or named):
        named = {**named, "host": host}
    texts = [named[kind] if kind == "host" else f"{kind} {named[kind]}" for kind in CULPRIT_KINDS if kind in named]
    return " ".join(texts) or None


def clock_s(line: str) -> float | None:
    """Return the first time of day in a line, in seconds since midnight; None if the line has none."""
    found = _CLOCK.search(line)
    if found is None:
        return None
    return int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3].replace(",", "."))


def classify(log: bytes | str) -> Verdict:
    """Return the verdict on a whole log."""
    classifier = LogClassifier()
    classifier.feed(log)
    return classifier.finish()
