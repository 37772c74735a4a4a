"""Rules of kernels.cuda_graphs."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf, assert_rules

GRAPHS = "--kernels.cuda_graphs=true"
CASES = {
    "fits": (["--parallel.recompute=full"], None),
    "tensor parallel": (
        ["--parallel.tp_size=2"],
        (
            "kernels.cuda_graphs=true cannot be combined with parallel.tp_size=2: the collectives of tensor "
            "parallelism cannot be captured; use tp_size=1 or cuda_graphs=false "
            "(--kernels.cuda_graphs on the command line)"
        ),
    ),
    "pipeline": (
        ["--parallel.pp_size=2"],
        (
            "kernels.cuda_graphs=true cannot be combined with parallel.pp_size=2: a backward must follow its forward; "
            "use pp_size=1 or cuda_graphs=false "
            "(--kernels.cuda_graphs on the command line)"
        ),
    ),
    "schedule": (
        ["--parallel.schedule=gpipe"],
        (
            'kernels.cuda_graphs=true cannot be combined with parallel.schedule="gpipe": a backward must follow its '
            'forward; use schedule="1f1b" or cuda_graphs=false (--kernels.cuda_graphs on the command line)'
        ),
    ),
    "chunks of a stage": (
        ["--parallel.schedule=interleaved", "--parallel.num_chunks=2"],
        (
            'kernels.cuda_graphs=true cannot be combined with parallel.schedule="interleaved": a backward must follow '
            'its forward; use schedule="1f1b" or cuda_graphs=false (--kernels.cuda_graphs on the command line)'
        ),
    ),
    "whole gradients that go": (
        ["--parallel.zero_stage=2"],
        (
            "kernels.cuda_graphs=true cannot be combined with parallel.zero_stage=2: ZeRO-2 sums each micro-batch in "
            "different memory; use zero_stage=1 or cuda_graphs=false "
            "(--kernels.cuda_graphs on the command line)"
        ),
    ),
    "ways to host memory": (
        ["--parallel.offload_layers=1"],
        (
            "kernels.cuda_graphs=true cannot be combined with parallel.offload_layers=1: copies to host memory cannot "
            "be captured; use offload_layers=0 or cuda_graphs=false "
            "(--kernels.cuda_graphs on the command line)"
        ),
    ),
    "documents": (
        ["--data.has_document_mask=true"],
        (
            "kernels.cuda_graphs=true cannot be combined with data.has_document_mask=true: each micro-batch has "
            "different documents; use has_document_mask=false or cuda_graphs=false "
            "(--kernels.cuda_graphs on the "
            "command line)"
        ),
    ),
}


def test_configurations_without_cuda_graphs_are_refused(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, {name: ([GRAPHS, *overrides], problem) for name, (overrides, problem) in CASES.items()})
    assert_rules(problems_of, {name: (overrides, None) for name, (overrides, _) in CASES.items()})
