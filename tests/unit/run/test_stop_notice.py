"""What is said of a stop that takes longer than runtime.save_grace_s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.contracts.black_box_values import Phase, Progress
from megatrain.stop_notice import StopNotice

S = 1_000_000_000
PROGRESS = Progress(
    phase=Phase.STEP, phase_since_ns=0, current_step=7, step_started_ns=None, completed_step=6, completed_ns=40 * S,
    last_step_ns=90 * S, median_step_ns=None, obeyed_command=0, num_lost_ends=0,
)  # fmt: skip


@pytest.mark.parametrize("seconds", [None, 1, 40])
def test_nothing_is_said_while_the_grace_is_long_enough(seconds: int | None) -> None:
    notice = StopNotice(60.0)
    measured = replace(PROGRESS, median_step_ns=None if seconds is None else seconds * S)
    assert notice.after_step(measured) == ""  # a first step compiles, and says nothing


def test_figures_and_way_out_are_said_once_and_again_when_they_grow() -> None:
    notice = StopNotice(60.0)
    slow = replace(PROGRESS, median_step_ns=50 * S)
    assert notice.after_step(slow) == (
        "WARNING: a stop may take 50 s (a step 50 s), and runtime.save_grace_s=60 is short for that: the job gives "
        "itself up to 100 s. Set runtime.save_grace_s=100, and have whoever ends the job wait as long "
        "(docs/guides/stopping.md)"
    )
    assert notice.after_step(slow) == ""
    saved = replace(slow, longest_evaluation_ns=20 * S, longest_checkpoint_ns=S // 2, longest_write_ns=int(9.5 * S))
    assert "80 s (a step 50 s, an evaluation 20 s, a snapshot 500 ms, its way to storage 9.5 s)" in notice.after_step(
        saved
    )
    assert notice.after_step(saved) == ""
