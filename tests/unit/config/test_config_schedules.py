"""Rules of the schedule: alignment of reductions, zero bubble, and sequence chunks."""

from __future__ import annotations

import pytest

from tests.unit.config.conftest import ProblemsOf, assert_rules

INTERLEAVED = ["--parallel.num_chunks=2", "--parallel.schedule=interleaved"]
ALIGNED = ["--parallel.has_aligned_reductions=true", "--parallel.pp_size=2", *INTERLEAVED]
ALIGNMENT_CASES: list[tuple[list[str], str | None]] = [
    ([], None),
    (
        ["--parallel.num_chunks=1", "--parallel.schedule=zero_bubble"],
        ("parallel.has_aligned_reductions=true defers reductions behind later computes of their stage, and "
         "parallel.num_chunks=1 reduces after the last one; use has_aligned_reductions=false, or num_chunks=2 "
         'with schedule="interleaved"'),
    ),
    (
        ["--parallel.pp_size=1"],
        ("parallel.has_aligned_reductions=true makes the stages of a pipeline reduce together, and "
         "parallel.pp_size=1 has one stage; use has_aligned_reductions=false or pp_size=2"),
    ),
    (
        ["--parallel.zero_stage=2"],
        ("parallel.has_aligned_reductions=true defers the reduction of a chunk's gradients, and parallel.zero_stage=2 "
         "reduces after every micro-batch; use zero_stage=1 or has_aligned_reductions=false"),
    ),
]  # fmt: skip


ZERO_BUBBLE = ["--parallel.schedule=zero_bubble", "--parallel.pp_size=4"]
FP8 = ["--fp8.recipe=tensorwise", "--train.precision=bf16", "--fp8.backend=transformer_engine"]
ZERO_BUBBLE_CASES: list[tuple[list[str], str | None]] = [
    ([], None), (["--parallel.recompute=full", "--parallel.offload_layers=1", "--parallel.overlap=false"], None),
    (
        ["--parallel.pp_size=1"],
        ('parallel.schedule="zero_bubble" fills the bubble of a pipeline, and parallel.pp_size=1 has none; use '
         'schedule="1f1b" or pp_size=2'),
    ),
    (
        ["--parallel.zero_stage=2"],
        ("parallel.zero_stage=2 releases a micro-batch's gradients after its backward, and "
         'parallel.schedule="zero_bubble" defers most of them; use zero_stage=1 or schedule="1f1b"'),
    ),
    (
        ["--parallel.num_chunks=2"],
        ('parallel.num_chunks=2 needs parallel.schedule="interleaved", found "zero_bubble"; use '
         'schedule="interleaved" or num_chunks=1'),
    ),
    (
        ["--parallel.dp_size=16"],
        ("batch.global_batch_size=48: num_microbatches=3 (batch.global_batch_size / (batch.micro_batch_size * "
         'dp_size), rounded up) must be at least parallel.pp_size=4 for parallel.schedule="zero_bubble", or there '
         "are too few wgrads to fill the bubble; raise batch.global_batch_size to 4 micro-batches or use "
         'schedule="1f1b"; the smallest batch that fills every pipeline is 64'),
    ),
    (
        ["--parallel.tp_size=2", "--parallel.num_sequence_chunks=2"],
        ("parallel.num_sequence_chunks=2 overlaps collectives with matrix multiplications that "
         'parallel.schedule="zero_bubble" defers; use num_sequence_chunks=1 or schedule="1f1b"'),
    ),
    (
        ["--kernels.cuda_graphs=true"],
        ("kernels.cuda_graphs=true cannot be combined with parallel.pp_size=4: a backward must follow its "
         "forward; use pp_size=1 or cuda_graphs=false"),
    ),
    (
        FP8,
        ('fp8.backend="transformer_engine" computes weights\' gradients in its own backward, where '
         'parallel.schedule="zero_bubble" cannot defer them; use backend="megatrain" or schedule="1f1b"'),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "cases"),
    [(ALIGNED, ALIGNMENT_CASES), (ZERO_BUBBLE, ZERO_BUBBLE_CASES)],
    ids=["aligned reductions", "zero bubble"],
)
def test_layouts_that_a_schedule_cannot_have_are_refused(
    settings: list[str], cases: list[tuple[list[str], str | None]], problems_of: ProblemsOf
) -> None:
    for overrides, expected in cases:
        found = [problem.rpartition(" (")[0] for problem in problems_of(*settings, *overrides)]
        assert found == ([expected] if expected else []), overrides


FITTING = ["--parallel.tp_size=4", "--parallel.num_sequence_chunks=8"]
IN_FP8 = [
    "--model.num_heads=10", "--model.hidden_size=320", "--parallel.tp_size=2", "--fp8.recipe=tensorwise",
    "--parallel.num_sequence_chunks=2",
]  # fmt: skip
CHUNK_CASES = {
    "equal parts of a rank's rows": (FITTING, None), "without overlap": ([*FITTING, "--parallel.overlap=false"], None),
    "unequal parts": (
        ["--parallel.tp_size=4", "--parallel.num_sequence_chunks=6"],
        ("parallel.num_sequence_chunks=6 must divide model.seq_len / parallel.tp_size = 64 / 4 = 16; "
         "use 1, 2, 4, 8 or 16 (--parallel.num_sequence_chunks on the command line)"),
    ),
    "no rank to exchange with": (
        ["--parallel.num_sequence_chunks=4"],
        ("parallel.num_sequence_chunks=4 does nothing with parallel.tp_size=1; use tp_size=2 or more, or "
         "num_sequence_chunks=1 (--parallel.num_sequence_chunks on the command line)"),
    ),
    "all layers in FP8": (
        IN_FP8,
        ("parallel.num_sequence_chunks=2 does nothing if all layers multiply in FP8, which needs all rows at once; "
         'use num_sequence_chunks=1 or fp8.recipe="none" (--parallel.num_sequence_chunks on the command line)'),
    ),
    "a layer that does not multiply in FP8": ([*IN_FP8, "--fp8.skip_layers=[0]"], None),
}  # fmt: skip


def test_rules_of_sequence_chunks(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, CHUNK_CASES)


def test_wrong_sizes_are_reported_once(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of("--parallel.tp_size=3", "--parallel.num_sequence_chunks=2", "--model.num_heads=15",
                             "--model.hidden_size=480", "--model.vocab_multiple=3")  # fmt: skip

    assert problem.startswith("parallel.tp_size=3 must divide model.seq_len=64")
