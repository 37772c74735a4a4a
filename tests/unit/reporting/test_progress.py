"""The progress line: rewritten in place on a terminal, absent elsewhere, never wider than the terminal."""

from __future__ import annotations

import os
import pty
from collections.abc import Callable

import pytest

from megatrain.reporting import Reporter, StepReport
from megatrain.reporting.console import Console, open_console
from megatrain.reporting.lines import RunProgress, duration_text, progress_line, rate_text
from tests.unit.reporting.conftest import Clock, Stream

PROGRESS = RunProgress(step=250, total_steps=1000, loss=3.14159, tokens_per_s=12345.6, remaining_s=3723)


@pytest.fixture(autouse=True)
def _ordinary_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


def test_progress_line_drops_parts_that_do_not_fit() -> None:
    lines = {
        120: "step 250/1000 [#######.......................] | ETA 1:02:03 | loss 3.1416 | 12,346 tokens/s",
        74: "step 250/1000 [###.........] | ETA 1:02:03 | loss 3.1416 | 12,346 tokens/s",
        71: "step 250/1000 | ETA 1:02:03 | loss 3.1416 | 12,346 tokens/s",
        60: "step 250/1000 | ETA 1:02:03 | loss 3.1416 | 12,346 tokens/s",
        50: "step 250/1000 | ETA 1:02:03 | loss 3.1416",
        30: "step 250/1000 | ETA 1:02:03",
        20: "step 250/1000",
        6: "step 2",
    }
    assert {width: progress_line(PROGRESS, width) for width in lines} == lines
    assert [width for width in range(1, 130) if len(progress_line(PROGRESS, width)) > width] == []


def test_durations_and_rates_are_readable() -> None:
    durations = {7: "0:07", 59.6: "1:00", 3723: "1:02:03", 2 * 86400 + 3723: "2d 01:02:03", float("inf"): "-"}
    assert {seconds: duration_text(seconds) for seconds in durations} == durations
    rates = {1234567.8: "1,234,568", 99.94: "99.9", 0.12345: "0.123", 0: "0"}
    assert {rate: rate_text(rate) for rate in rates} == rates


def test_a_terminal_sees_progress_between_the_lines(
    make_reporter: Callable[..., Reporter], make_step: Callable[..., StepReport], terminal: Stream, clock: Clock
) -> None:
    with make_reporter(terminal) as reporter:
        for step in range(1, 4):
            clock.now += 2
            reporter.step(make_step(step))
        reporter.print_line("a note")

    shown = terminal.getvalue().split("consumed 8,000 tokens\n")[1]
    # After the first line: progress at 1 and 2, erased for the line of 3, progress again, erased for the note.
    first, second, third, rest = shown.split("\r\x1b[K")
    assert first.startswith("step 1/10 [")
    assert "ETA 0:18 | loss 3.0000 | 4,000 tokens/s" in first
    assert "ETA 0:16" in second
    assert third.startswith("step 3/10 | loss")
    assert "consumed 24,000 tokens\nstep 3/10" in third
    assert rest == "a note\n"
    assert "\x1b[2m" not in shown


def test_progress_line_is_erased_when_the_reporter_closes(
    make_reporter: Callable[..., Reporter], make_step: Callable[..., StepReport], terminal: Stream, clock: Clock
) -> None:
    with make_reporter(terminal) as reporter:
        clock.now += 2
        reporter.step(make_step(1))

    assert terminal.getvalue().endswith("\r\x1b[K")


def test_progress_is_not_written_to_a_file(
    make_reporter: Callable[..., Reporter], make_step: Callable[..., StepReport], stream: Stream, clock: Clock
) -> None:
    with make_reporter() as reporter:
        for step in range(1, 11):
            clock.now += 2
            reporter.step(make_step(step))

    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert "ETA" not in stream.getvalue()


def test_progress_is_drawn_at_most_ten_times_a_second(clock: Clock, terminal: Stream) -> None:
    console = Console(terminal, is_terminal=True, has_color=False, columns=lambda: 80, clock=clock)
    for _ in range(11):
        console.progress(lambda _width: "p")
        clock.now += 0.03

    assert terminal.getvalue().count("p") == 3


def test_environment_decides_on_progress_and_color(clock: Clock) -> None:
    for environment, is_drawn, is_colored in (
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, False, False),
    ):
        terminal = Stream(is_terminal=True)
        open_console(terminal, environment, clock).progress(lambda _width: "progress")
        shown = terminal.getvalue()
        assert ("progress" in shown, "\x1b[2m" in shown) == (is_drawn, is_colored), environment


def test_the_width_is_that_of_the_terminal(clock: Clock) -> None:
    termios = pytest.importorskip("termios")
    widths: list[int] = []
    leader, follower = pty.openpty()
    try:
        for columns in (132, 40, 0):
            termios.tcsetwinsize(follower, (24, columns))
            with os.fdopen(os.dup(follower), "w") as stream:
                open_console(stream, {"TERM": "xterm"}, clock).progress(lambda width: widths.append(width) or "")
    finally:
        os.close(leader)
        os.close(follower)

    assert widths == [131, 39, 79]
