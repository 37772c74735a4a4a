"""The time after which ranks without progress count as stalled, in tables."""

from __future__ import annotations

from dataclasses import replace

from megatrain.contracts.black_box.values import Phase, Progress
from megatrain.fencing.phase_timeouts import PhaseTimeouts, find_stall

S = 1_000_000_000
PHASE_TIMEOUTS = PhaseTimeouts(init_s=300, first_step_s=600, checkpoint_s=400, evaluation_s=500, floor_s=5, factor=10)


def progress(
    phase: Phase = Phase.STEP, *, median_s: float | None = 0.1, last_s: float | None = 0.1, since_s: float = 0
) -> Progress:
    """Return the progress of a rank that entered its phase and has done nothing since."""

    def ns(seconds: float | None) -> int | None:
        return None if seconds is None else int(seconds * S)

    return Progress(
        phase=phase,
        phase_since_ns=int(since_s * S),
        current_step=7,
        step_started_ns=None,
        completed_step=6,
        completed_ns=None,
        last_step_ns=ns(last_s),
        median_step_ns=ns(median_s),
        completed_command=0,
        num_lost_ends=0,
    )


LIMITS = [
    (progress(), 5.0),  # Ten times 0.1 s is below the minimum.
    (progress(median_s=2.0), 20.0),
    (progress(median_s=None, last_s=3.0), 30.0),  # The first step is used as the median.
    (progress(median_s=None, last_s=90.0), 600.0),  # No step may take longer than the first one may.
    (progress(median_s=None, last_s=None), 600.0),
    (progress(Phase.INIT), 300.0),
    (progress(Phase.FIRST_STEP), 600.0),
    (progress(Phase.CHECKPOINT), 400.0),
    (progress(Phase.EVALUATION), 500.0),
    (progress(Phase.STOPPING), 400.0),
]


def test_each_phase_has_its_own_limit() -> None:
    for state, limit_s in LIMITS:
        assert PHASE_TIMEOUTS.limit_s(state) == limit_s, state
        assert find_stall({3: state}, PHASE_TIMEOUTS, int((limit_s - 0.01) * S), 1000.0) is None, state
        stall = find_stall({3: state}, PHASE_TIMEOUTS, int((limit_s + 0.01) * S), 1000.0)
        assert stall is not None, state
        assert (stall.ranks, stall.limit_s, stall.step, stall.at_unix_s) == ((3,), limit_s, 7, 1000.0)
        assert stall.phase == state.phase.name.lower().replace("_", "-")


def test_a_new_phase_a_begun_and_a_completed_step_are_progress() -> None:
    for field in ("phase_since_ns", "step_started_ns", "completed_ns"):
        state = replace(progress(), **{field: 50 * S})
        assert find_stall({0: state}, PHASE_TIMEOUTS, 54 * S, 0.0) is None, field
        assert find_stall({0: state}, PHASE_TIMEOUTS, 56 * S, 0.0) is not None, field


def test_stall_names_all_late_ranks_and_describes_the_longest() -> None:
    ranks = {4: progress(since_s=3), 5: progress(since_s=1), 6: progress(since_s=9.5), 7: progress(Phase.CHECKPOINT)}
    stall = find_stall(ranks, PHASE_TIMEOUTS, 10 * S, 0.0)
    assert stall is not None
    assert (stall.ranks, stall.silent_s) == ((4, 5), 9.0)


MEASURED = [
    (Phase.CHECKPOINT, 0.02, 5.0),  # Ten times that is below the minimum.
    (Phase.CHECKPOINT, 3.0, 30.0),
    (Phase.CHECKPOINT, 90.0, 400.0),  # never longer than configured
    (Phase.EVALUATION, 2.0, 20.0),
    (Phase.STOPPING, 0.02, 400.0),  # The last wait for storage differs from all earlier ones.
    (Phase.STEP, 90.0, 5.0),
]
"""Phase, the longest earlier duration, limit."""


def test_limit_of_a_repeated_phase_follows_from_its_longest() -> None:
    for phase, longest_s, limit_s in MEASURED:
        longest_ns = int(longest_s * S)
        state = replace(progress(phase), longest_checkpoint_ns=longest_ns, longest_evaluation_ns=longest_ns)
        assert PHASE_TIMEOUTS.limit_s(state) == limit_s, (phase, longest_s)
