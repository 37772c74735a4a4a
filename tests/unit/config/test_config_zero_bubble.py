"""The zero-bubble schedule needs a pipeline with enough micro-batches, one chunk per stage, and whole gradients."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf

ZERO_BUBBLE = ["--parallel.schedule=zero_bubble", "--parallel.pp_size=4"]
FP8 = ["--fp8.recipe=tensorwise", "--train.precision=bf16", "--fp8.backend=transformer_engine"]
CASES: list[tuple[list[str], str | None]] = [
    ([], None),
    (["--parallel.recompute=full", "--parallel.offload_layers=1", "--parallel.overlap=false"], None),
    (
        ["--parallel.pp_size=1"],
        (
            'parallel.schedule="zero_bubble" fills the bubble of a pipeline, and parallel.pp_size=1 has none; use '
            'schedule="1f1b" or pp_size=2'
        ),
    ),
    (
        ["--parallel.zero_stage=2"],
        (
            "parallel.zero_stage=2 releases a micro-batch's gradients after its backward, and "
            'parallel.schedule="zero_bubble" defers most of them; use zero_stage=1 or schedule="1f1b"'
        ),
    ),
    (
        ["--parallel.num_chunks=2"],
        (
            'parallel.num_chunks=2 needs parallel.schedule="interleaved", found "zero_bubble"; use '
            'schedule="interleaved" or num_chunks=1'
        ),
    ),
    (
        ["--parallel.dp_size=16"],
        (
            "batch.global_batch_size=48: num_microbatches=3 (batch.global_batch_size / (batch.micro_batch_size * "
            'dp_size), rounded up) must be at least parallel.pp_size=4 for parallel.schedule="zero_bubble", or there '
            "are too few wgrads to fill the bubble; raise batch.global_batch_size to 4 micro-batches or use "
            'schedule="1f1b"; the smallest batch that fills every pipeline is 64'
        ),
    ),
    (
        ["--parallel.tp_size=2", "--parallel.num_sequence_chunks=2"],
        (
            "parallel.num_sequence_chunks=2 overlaps collectives with matrix multiplications that "
            'parallel.schedule="zero_bubble" defers; use num_sequence_chunks=1 or schedule="1f1b"'
        ),
    ),
    (
        ["--kernels.cuda_graphs=true"],
        (
            "kernels.cuda_graphs=true cannot be combined with parallel.pp_size=4: a backward must follow its "
            "forward; use pp_size=1 or cuda_graphs=false"
        ),
    ),
    (
        FP8,
        (
            'fp8.backend="transformer_engine" computes weights\' gradients in its own backward, where '
            'parallel.schedule="zero_bubble" cannot defer them; use backend="megatrain" or schedule="1f1b"'
        ),
    ),
]


def test_layouts_that_zero_bubble_cannot_have_are_refused(problems_of: ProblemsOf) -> None:
    for overrides, expected in CASES:
        found = [problem.rpartition(" (")[0] for problem in problems_of(*ZERO_BUBBLE, *overrides)]
        assert found == ([expected] if expected else []), overrides
