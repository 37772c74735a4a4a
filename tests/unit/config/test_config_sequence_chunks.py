"""Rules of parallel.num_sequence_chunks."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf, assert_rules

FITTING = ["--parallel.tp_size=4", "--parallel.num_sequence_chunks=8"]
IN_FP8 = [
    "--model.num_heads=10",
    "--model.hidden_size=320",
    "--parallel.tp_size=2",
    "--fp8.recipe=tensorwise",
    "--parallel.num_sequence_chunks=2",
]
CASES = {
    "equal parts of a rank's rows": (FITTING, None),
    "without overlap": ([*FITTING, "--parallel.overlap=false"], None),
    "unequal parts": (
        ["--parallel.tp_size=4", "--parallel.num_sequence_chunks=6"],
        (
            "parallel.num_sequence_chunks=6 must divide model.seq_len / parallel.tp_size = 64 / 4 = 16; "
            "use 1, 2, 4, 8 or 16 (--parallel.num_sequence_chunks on the command line)"
        ),
    ),
    "no rank to exchange with": (
        ["--parallel.num_sequence_chunks=4"],
        (
            "parallel.num_sequence_chunks=4 does nothing with parallel.tp_size=1; use tp_size=2 or more, or "
            "num_sequence_chunks=1 (--parallel.num_sequence_chunks on the command line)"
        ),
    ),
    "all layers in FP8": (
        IN_FP8,
        (
            "parallel.num_sequence_chunks=2 does nothing if all layers multiply in FP8, which needs all rows at once; "
            'use num_sequence_chunks=1 or fp8.recipe="none" (--parallel.num_sequence_chunks on the command line)'
        ),
    ),
    "a layer that does not multiply in FP8": ([*IN_FP8, "--fp8.skip_layers=[0]"], None),
}


def test_rules_of_sequence_chunks(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, CASES)


def test_wrong_sizes_are_reported_once(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of("--parallel.tp_size=3", "--parallel.num_sequence_chunks=2", "--model.num_heads=15",
                             "--model.hidden_size=480", "--model.vocab_multiple=3")  # fmt: skip

    assert problem.startswith("parallel.tp_size=3 must divide model.seq_len=64")
