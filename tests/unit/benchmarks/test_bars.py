"""A benchmark fails beyond its bar, and a figure that is no number is beyond every bar."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks.bars import as_written, at_least, at_most, must_hold
from benchmarks.result import Result


@pytest.mark.parametrize(
    ("sentences", "is_beyond"),
    [
        (at_most("a", 1.0, 1.0), False),
        (at_most("a", 1.1, 1.0), True),
        (at_most("a", math.nan, 1.0), True),
        (at_least("a", 1.0, 1.0), False),
        (at_least("a", 0.9, 1.0), True),
        (at_least("a", math.nan, 1.0), True),
        (must_hold("a", True), False),
        (must_hold("a", False), True),
        (as_written("a", 5.0, ""), False),
        (as_written("a", 5.0, "-"), False),
        (as_written("a", 1.3, "<= 1.3"), False),
        (as_written("a", 1.31, "<= 1.3"), True),
        (as_written("a", 0.79, ">= 0.8"), True),
    ],
)
def test_bars(sentences: list[str], is_beyond: bool) -> None:
    assert bool(sentences) is is_beyond


@pytest.mark.parametrize("beyond", [[], ["the ratio is 2; it must be at most 1"]])
def test_the_command_fails_beyond_a_bar_and_says_which(
    beyond: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result("made", "Made", "command", [{"figure": 1}], [], beyond)
    monkeypatch.setattr(command, "NAMES", ("made",))
    monkeypatch.setitem(sys.modules, "benchmarks.made", SimpleNamespace(run=lambda: result))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "made"])

    assert command.main() == len(beyond)
    assert all(f"BEYOND THE BAR: {one}" in capsys.readouterr().out for one in beyond)
