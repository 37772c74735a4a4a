"""Rules of [fp8] and [kernels]: the allowed names, where they apply, and CUDA graphs."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf, assert_rules

FITTING = ["--model.num_heads=10", "--fp8.recipe=tensorwise"]
CASES = {
    "fits": (FITTING, None), "rowwise": ([*FITTING, "--fp8.recipe=rowwise", "--fp8.skip_layers=[0, 7]"], None),
    "delayed": ([*FITTING, "--fp8.scaling=delayed", "--fp8.history_len=4"], None),
    "delayed, replicas with unequal numbers of micro-batches": (
        [*FITTING, "--fp8.scaling=delayed", "--parallel.dp_size=5"], None,
    ),
    "current, with replaced samples": ([*FITTING, "--data.bad_samples=replace"], None),
    "delayed, with replaced samples": (
        [*FITTING, "--fp8.scaling=delayed", "--data.bad_samples=replace"],
        ('data.bad_samples="replace" replaces bad samples by samples without labels, whose magnitudes '
         'would change the scales of fp8.scaling="delayed"; use scaling="current", or data.bad_samples="refuse" '
         "(--data.bad_samples on the command line)"),
    ),
    "current, with empty micro-batches": ([*FITTING, "--parallel.dp_size=5", "--parallel.zero_stage=2"], None),
    "delayed, with empty micro-batches": (
        [*FITTING, "--fp8.scaling=delayed", "--parallel.dp_size=5", "--parallel.zero_stage=2"],
        ('fp8.scaling="delayed" allows no empty micro-batches, as their magnitudes would change the scales; a '
         "global batch of 48 is 48 micro-batches for 5 replicas, and the last has 9 for 10 slots; use "
         'scaling="current" or a batch of 45 or 50 (--fp8.scaling on the command line)'),
    ),
    "delayed, with empty micro-batches at the start of a ramp-up": (
        [
            *(*FITTING, "--fp8.scaling=delayed", "--parallel.dp_size=6", "--parallel.zero_stage=2"),
            *("--batch.rampup_start=36", "--batch.rampup_increment=4", "--batch.rampup_samples=100"),
        ],
        ('fp8.scaling="delayed" allows no empty micro-batches, as their magnitudes would change the scales; a '
         "global batch of 40 is 40 micro-batches for 6 replicas, and the last has 6 for 7 slots; use "
         'scaling="current" or a batch of 36 or 42 (--fp8.scaling on the command line)'),
    ),
    "delayed, in a pipeline that some replicas do not fill": (
        [
            *(*FITTING, "--fp8.scaling=delayed", "--parallel.dp_size=15", "--parallel.pp_size=4"),
            "--parallel.schedule=zero_bubble",
        ],
        ('fp8.scaling="delayed" allows no empty micro-batches, as their magnitudes would change the scales; a '
         "global batch of 48 is 48 micro-batches for 15 replicas, and the last has 3 for 4 slots; use "
         'scaling="current" or a batch of 60 (--fp8.scaling on the command line)'),
    ),
    "delayed, in an interleaved pipeline that one replica does not fill": (
        [
            *(*FITTING, "--fp8.scaling=delayed", "--parallel.dp_size=2", "--parallel.pp_size=4"),
            *("--parallel.schedule=interleaved", "--parallel.num_chunks=2", "--batch.global_batch_size=7"),
        ],
        ('fp8.scaling="delayed" allows no empty micro-batches, as their magnitudes would change the scales; a '
         "global batch of 7 is 7 micro-batches for 2 replicas, and the last has 3 for 4 slots; use "
         'scaling="current" or a batch of 8 (--fp8.scaling on the command line)'),
    ),
    "delayed, with the batch that the message names": (
        [
            *(*FITTING, "--fp8.scaling=delayed", "--parallel.dp_size=2", "--parallel.pp_size=4"),
            *("--parallel.schedule=interleaved", "--parallel.num_chunks=2", "--batch.global_batch_size=8"),
        ],
        None,
    ),
    "scaling without a recipe": (
        ["--fp8.scaling=delayed"],
        ('fp8.scaling="delayed" does nothing with fp8.recipe="none"; use recipe="tensorwise" or scaling="current" '
         "(--fp8.scaling on the command line)"),
    ),
    "layers without a recipe": (
        ["--fp8.skip_layers=[0]"],
        ('fp8.skip_layers=[0] does nothing with fp8.recipe="none"; use recipe="tensorwise" or skip_layers=[] '
         "(--fp8.skip_layers on the command line)"),
    ),
    "backend without a recipe": (
        ["--fp8.backend=transformer_engine"],
        ('fp8.backend="transformer_engine" does nothing with fp8.recipe="none"; use recipe="tensorwise" or '
         'backend="megatrain" (--fp8.backend on the command line)'),
    ),
    "all layers skipped": (
        [*FITTING, "--fp8.skip_layers=[0, 1, 2, 3, 4, 5, 6, 7]"],
        ('fp8.skip_layers names all 8 layers, so fp8.recipe="tensorwise" does nothing; use recipe="none" or name '
         "fewer (--fp8.skip_layers on the command line)"),
    ),
    "a layer skipped twice": (
        [*FITTING, "--fp8.skip_layers=[0, 3, 0]"],
        "fp8.skip_layers names layer 0 2 times; name it once (--fp8.skip_layers on the command line)",
    ),
    "transformer engine": ([*FITTING, "--fp8.backend=transformer_engine", "--fp8.skip_layers=[0]"], None),
    "transformer engine by row": (
        [*FITTING, "--fp8.backend=transformer_engine", "--fp8.recipe=rowwise"],
        ('fp8.recipe="rowwise" is not available with fp8.backend="transformer_engine", which scales by tensor or by '
         'block; use recipe="tensorwise" or backend="megatrain" (--fp8.recipe on the command line)'),
    ),
    "transformer engine, delayed": (
        [*FITTING, "--fp8.backend=transformer_engine", "--fp8.scaling=delayed"],
        ('fp8.scaling="delayed" with fp8.backend="transformer_engine" would keep histories in its own modules, '
         'which checkpoints do not contain; use scaling="current" or backend="megatrain" (--fp8.scaling on the '
         "command line)"),
    ),
    "transformer engine on processors": (
        [*FITTING, "--fp8.backend=transformer_engine", "--runtime.device=cpu"],
        ('fp8.backend="transformer_engine" runs on GPUs only, and runtime.device="cpu"; use backend="megatrain" or '
         "another device (--fp8.backend on the command line)"),
    ),
    "history of current scaling": (
        [*FITTING, "--fp8.history_len=4"],
        ('fp8.history_len=4 does nothing with fp8.scaling="current"; use scaling="delayed" or history_len=16 '
         "(--fp8.history_len on the command line)"),
    ),
    "delayed by row": (
        [*FITTING, "--fp8.recipe=rowwise", "--fp8.scaling=delayed"],
        ('fp8.scaling="delayed" needs one scale for each tensor, but fp8.recipe="rowwise" has one for each row; use '
         'scaling="current" or recipe="tensorwise" (--fp8.scaling on the command line)'),
    ),
    "precision": (
        [*FITTING, "--train.precision=fp32"],
        ('fp8.recipe="tensorwise" needs train.precision="bf16", not "fp32"; use that precision or recipe="none" '
         "(--fp8.recipe on the command line)"),
    ),
    "no such layer": (
        [*FITTING, "--fp8.skip_layers=[0, 8]"],
        ("fp8.skip_layers names layer 8, but with model.num_layers=8 the last layer is 7; remove the layer "
         "(--fp8.skip_layers on the command line)"),
    ),
    "key heads": (
        ["--fp8.recipe=tensorwise", "--model.num_kv_heads=1"],
        ('fp8.recipe="tensorwise" needs multiples of 16, and the width of key heads on a rank is 8; change '
         "model.num_kv_heads or model.num_heads or model.hidden_size or model.head_dim so that it is 16 "
         "(--fp8.recipe on the command line)"),
    ),
    "tokens": (
        [*FITTING, "--model.seq_len=40"],
        ('fp8.recipe="tensorwise" needs multiples of 16, and the number of tokens in a micro-batch is 40; change '
         "model.seq_len or batch.micro_batch_size so that it is 32 or 48 (--fp8.recipe on the command line)"),
    ),
}  # fmt: skip


def test_rules_of_fp8(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, CASES)


KERNEL_CASES = {
    "apex": (["--kernels.norm=apex", "--runtime.device=cuda"], None),
    "apex with RMSNorm in fp64": (["--kernels.norm=apex", "--model.norm=rmsnorm", "--train.precision=fp64"], None),
    "apex on processors": (
        ["--kernels.norm=apex", "--runtime.device=cpu"],
        ('kernels.norm="apex" runs on GPUs only, and runtime.device="cpu"; use norm="megatrain" or another device '
         "(--kernels.norm on the command line)"),
    ),
    "apex with LayerNorm in fp64": (
        ["--kernels.norm=apex", "--model.norm=layernorm", "--train.precision=fp64"],
        ('kernels.norm="apex" has no backward of model.norm="layernorm" for train.precision="fp64"; use '
         'kernels.norm="megatrain" or precision="fp32" (--kernels.norm on the command line)'),
    ),
}  # fmt: skip


def test_rules_of_kernels(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, KERNEL_CASES)


GRAPHS = "--kernels.cuda_graphs=true"
GRAPH_CASES = {
    "fits": (["--parallel.recompute=full"], None),
    "tensor parallel": (
        ["--parallel.tp_size=2"],
        ("kernels.cuda_graphs=true cannot be combined with parallel.tp_size=2: the collectives of tensor parallelism "
         "cannot be captured; use tp_size=1 or cuda_graphs=false (--kernels.cuda_graphs on the command line)"),
    ),
    "pipeline": (
        ["--parallel.pp_size=2"],
        ("kernels.cuda_graphs=true cannot be combined with parallel.pp_size=2: a backward must follow its forward; use "
         "pp_size=1 or cuda_graphs=false (--kernels.cuda_graphs on the command line)"),
    ),
    "schedule": (
        ["--parallel.schedule=gpipe"],
        ('kernels.cuda_graphs=true cannot be combined with parallel.schedule="gpipe": a backward must follow its '
         'forward; use schedule="1f1b" or cuda_graphs=false (--kernels.cuda_graphs on the command line)'),
    ),
    "chunks of a stage": (
        ["--parallel.schedule=interleaved", "--parallel.num_chunks=2"],
        ('kernels.cuda_graphs=true cannot be combined with parallel.schedule="interleaved": a backward must follow its '
         'forward; use schedule="1f1b" or cuda_graphs=false (--kernels.cuda_graphs on the command line)'),
    ),
    "whole gradients that go": (
        ["--parallel.zero_stage=2"],
        ("kernels.cuda_graphs=true cannot be combined with parallel.zero_stage=2: ZeRO-2 sums each micro-batch in "
         "different memory; use zero_stage=1 or cuda_graphs=false (--kernels.cuda_graphs on the command line)"),
    ),
    "ways to host memory": (
        ["--parallel.offload_layers=1"],
        ("kernels.cuda_graphs=true cannot be combined with parallel.offload_layers=1: copies to host memory cannot be "
         "captured; use offload_layers=0 or cuda_graphs=false (--kernels.cuda_graphs on the command line)"),
    ),
    "documents": (
        ["--data.has_document_mask=true"],
        ("kernels.cuda_graphs=true cannot be combined with data.has_document_mask=true: each micro-batch has different "
         "documents; use has_document_mask=false or cuda_graphs=false (--kernels.cuda_graphs on the command line)"),
    ),
}  # fmt: skip


def test_configurations_without_cuda_graphs_are_refused(problems_of: ProblemsOf) -> None:
    assert_rules(
        problems_of, {name: ([GRAPHS, *overrides], problem) for name, (overrides, problem) in GRAPH_CASES.items()}
    )
    assert_rules(problems_of, {name: (overrides, None) for name, (overrides, _) in GRAPH_CASES.items()})
