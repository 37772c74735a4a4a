"""The time that a stop may take: the deadline of the watchdog, and the warning about runtime.save_grace_s."""

from __future__ import annotations

import math
import signal
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatrain.contracts.black_box.values import Phase, Progress
from megatrain.training.stopping.stop_notice import StopNotice
from megatrain.training.stopping.watchdog_process import GraceClock
from tests.helpers.completed_steps import completed_step

TERM = bytes([signal.SIGTERM])
USR1 = bytes([signal.SIGUSR1])
INT = bytes([signal.SIGINT])
CHILD = bytes([signal.SIGCHLD])
LAST_SIGNAL = bytes([64])


def extend(seconds: float) -> bytes:
    return struct.pack("<BdH", 0x81, seconds, 0)


STORIES: list[tuple[list[tuple[float, bytes]], float, str]] = [
    ([], math.inf, ""),
    ([(5, TERM)], 15, "SIGTERM"),
    ([(5, USR1)], 15, "SIGUSR1"),
    ([(5, INT)], 15, "SIGINT"),
    ([(5, CHILD), (6, LAST_SIGNAL)], math.inf, ""),
    # Another request neither shortens nor extends it.
    ([(5, TERM), (7, TERM), (9, USR1)], 15, "SIGTERM"),
    ([(5, CHILD + USR1 + TERM)], 15, "SIGUSR1"),
    # The grace period begins when the announced time is over, in either order of the two.
    ([(5, extend(100)), (6, TERM)], 115, "SIGTERM"),
    ([(5, TERM), (6, extend(100))], 116, "SIGTERM"),
    # The work ended before the announced time: the grace period begins now.
    ([(5, extend(100)), (6, TERM), (40, extend(0))], 50, "SIGTERM"),
    ([(5, extend(3)), (9, TERM)], 19, "SIGTERM"),
    ([(5, TERM + extend(2) + INT)], 17, "SIGTERM"),
    ([(5, extend(math.inf) + TERM)], math.inf, "SIGTERM"),
]
"""Messages by time, the resulting deadline, and the name of the signal."""


def test_deadline_follows_from_signals_and_extensions() -> None:
    for messages, deadline, name in STORIES:
        clock = GraceClock(grace_s=10)
        for now, data in messages:
            clock.feed(data, now)
        assert (clock.deadline, clock.signal_name) == (deadline, name), messages


def test_grace_clock_accepts_bytes_in_any_pieces() -> None:
    # The bytes of the double 2.5000000000000018 contain values that are signals on their own.
    # So do those of the path.
    busy = extend(struct.unpack("<d", b"\x0a\x0f\x02\x00\x00\x00\x04\x40")[0])
    follow = struct.pack("<BdH", 0x82, 0.0, 4) + b"/\x0f\x82\x02"
    data = CHILD + busy + follow + USR1 + TERM
    whole = GraceClock(grace_s=10)
    whole.feed(data, 5)
    for cut in range(len(data)):
        clock = GraceClock(grace_s=10)
        clock.feed(data[:cut], 5)
        clock.feed(data[cut:], 5)
        assert (clock.deadline, clock.signal_name) == (whole.deadline, "SIGUSR1")
        assert clock.black_box == Path("/\x0f\udc82\x02")


S = 1_000_000_000
PROGRESS = Progress(
    phase=Phase.STEP, phase_since_ns=0, current_step=7, step_started_ns=None, completed_step=6, completed_ns=40 * S,
    last_step_ns=90 * S, median_step_ns=None, completed_command=0, num_lost_ends=0,
)  # fmt: skip


def test_no_warning_while_the_grace_period_suffices() -> None:
    # without a median, only the duration of the first step is known, and that step compiles
    for median_step_ns in (None, 1 * S, 40 * S):
        notice = StopNotice(60.0, partial(replace, PROGRESS, median_step_ns=median_step_ns))
        assert notice.after_step(completed_step(7)) == "", median_step_ns


def test_figures_and_hint_are_logged_once_and_when_they_grow() -> None:
    slow = replace(PROGRESS, median_step_ns=50 * S)
    saved = replace(slow, longest_evaluation_ns=20 * S, longest_checkpoint_ns=S // 2, longest_write_ns=int(9.5 * S))
    measured = iter([slow, slow, saved, saved])
    notice = StopNotice(60.0, lambda: next(measured))
    texts = [notice.after_step(completed_step(index)) for index in range(4)]

    assert texts[0] == (
        "WARNING: a stop may take 50 s (a step 50 s), and runtime.save_grace_s=60 leaves too little room for that: the "
        "job extends its limit to 100 s. Set runtime.save_grace_s=100, and make the program that ends the job wait as "
        "long (docs/guides/stopping.md)"
    )
    assert "80 s (a step 50 s, an evaluation 20 s, a snapshot 500 ms, its copy to storage 9.5 s)" in texts[2]
    assert (texts[1], texts[3]) == ("", "")
