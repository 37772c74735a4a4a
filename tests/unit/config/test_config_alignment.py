"""Reductions are aligned if there are stages to align and whole gradients to defer."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf

INTERLEAVED = ["--parallel.num_chunks=2", "--parallel.schedule=interleaved"]
ALIGNED = ["--parallel.has_aligned_reductions=true", "--parallel.pp_size=2", *INTERLEAVED]
CASES: list[tuple[list[str], str | None]] = [
    ([], None),
    (
        ["--parallel.num_chunks=1", "--parallel.schedule=zero_bubble"],
        (
            "parallel.has_aligned_reductions=true defers reductions behind later computes of their stage, and "
            "parallel.num_chunks=1 reduces after the last one; use has_aligned_reductions=false, or num_chunks=2 "
            'with schedule="interleaved"'
        ),
    ),
    (
        ["--parallel.pp_size=1"],
        (
            "parallel.has_aligned_reductions=true makes the stages of a pipeline reduce together, and "
            "parallel.pp_size=1 has one stage; use has_aligned_reductions=false or pp_size=2"
        ),
    ),
    (
        ["--parallel.zero_stage=2"],
        (
            "parallel.has_aligned_reductions=true defers the reduction of a chunk's gradients, and "
            "parallel.zero_stage=2 reduces after every micro-batch; use zero_stage=1 or "
            "has_aligned_reductions=false"
        ),
    ),
]


def test_reductions_that_cannot_be_aligned_are_refused(problems_of: ProblemsOf) -> None:
    for overrides, expected in CASES:
        found = [problem.rpartition(" (")[0] for problem in problems_of(*ALIGNED, *overrides)]
        assert found == ([expected] if expected else []), overrides
