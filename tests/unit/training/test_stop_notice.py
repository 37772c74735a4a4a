"""The warning about a stop that takes longer than runtime.save_grace_s."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatrain.contracts.black_box.values import Phase, Progress
from megatrain.training.stopping.stop_notice import StopNotice
from tests.helpers.completed_steps import completed_step

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
