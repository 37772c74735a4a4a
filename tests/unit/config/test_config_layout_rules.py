"""The rules between sizes of the layout, the batch and the world: each message names valid sizes."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf, assert_rules

# The arguments and the whole message. Its location is that of the first key that the user set.
CASES = {
    "tp and heads": (
        ["--parallel.tp_size=8", "--model.seq_len=128"],
        "parallel.tp_size=8 must divide model.num_heads=20; use 1, 2 or 4 (--parallel.tp_size on the command line)",
    ),
    "tp and key-value heads": (
        ["--parallel.tp_size=4", "--model.num_kv_heads=10"],
        ("parallel.tp_size=4 must divide model.num_kv_heads=10 or be a multiple of it; use 1 or 2 "
         "(--parallel.tp_size on the command line)"),
    ),
    "more tp ranks than key-value heads": (["--parallel.tp_size=4", "--model.num_kv_heads=2"], None),
    "one key-value head": (["--parallel.tp_size=4", "--model.num_kv_heads=1"], None),
    "tp and feed-forward": (
        ["--parallel.tp_size=4", "--model.ffn_size=414"],
        "parallel.tp_size=4 must divide model.ffn_size=414; use 1 or 2 (--parallel.tp_size on the command line)",
    ),
    "tp and vocabulary": (["--parallel.tp_size=4", "--model.vocab_multiple=2"], None),
    "tp and odd vocabulary": (
        ["--parallel.tp_size=4", "--model.vocab_size=1001", "--model.vocab_multiple=1"],
        ("parallel.tp_size=4 must divide the padded vocabulary of 1001 (model.vocab_size=1001 rounded up to "
         "model.vocab_multiple=1); use 1, or model.vocab_multiple=4 (--parallel.tp_size on the command line)"),
    ),
    "tp and sequence": (
        ["--parallel.tp_size=4", "--model.seq_len=62"],
        ("parallel.tp_size=4 must divide model.seq_len=62 (sequence parallelism); use 1 or 2 "
         "(--parallel.tp_size on the command line)"),
    ),
    "layers and stages": (
        ["--parallel.pp_size=3"],
        ("model.num_layers=8 must be divisible by parallel.pp_size * parallel.num_chunks = 3 * 1 = 3; use "
         "num_layers=6 or 9, or pp_size and num_chunks whose product is 1, 2, 4 or 8, "
         "or name the layers of each chunk in parallel.layers_per_chunk (small.toml:5)"),
    ),
    "layers and chunks": (
        ["--parallel.pp_size=2", "--parallel.num_chunks=3", "--parallel.schedule=interleaved"],
        ("model.num_layers=8 must be divisible by parallel.pp_size * parallel.num_chunks = 2 * 3 = 6; use "
         "num_layers=6 or 12, or pp_size and num_chunks whose product is 1, 2, 4 or 8, "
         "or name the layers of each chunk in parallel.layers_per_chunk (small.toml:5)"),
    ),
    "more stages than layers": (
        ["--parallel.pp_size=16"],
        ("model.num_layers=8 must be divisible by parallel.pp_size * parallel.num_chunks = 16 * 1 = 16; use "
         "num_layers=16, or pp_size and num_chunks whose product is 1, 2, 4 or 8 (small.toml:5)"),
    ),
    "layers of each stage": (["--parallel.pp_size=3", "--parallel.layers_per_chunk=[3, 3, 2]"], None),
    "ends without layers": (["--parallel.pp_size=4", "--parallel.layers_per_chunk=[0, 5, 3, 0]"], None),
    "ends that count as layers": (
        ["--parallel.pp_size=5", "--parallel.counts_embedding_as_layer=true", "--parallel.counts_head_as_layer=true"],
        None,
    ),
    "too many layers are named": (
        ["--parallel.pp_size=3", "--parallel.layers_per_chunk=[3, 3, 3]"],
        ("parallel.layers_per_chunk=[3, 3, 3] has 9 layers in all and must have model.num_layers=8; change entries "
         "by -1 in all, or use num_layers=9 (--parallel.layers_per_chunk on the command line)"),
    ),
    "layers of too few chunks": (
        ["--parallel.pp_size=3", "--parallel.layers_per_chunk=[8]"],
        ("parallel.layers_per_chunk=[8] has 1 entry and must have one for each of parallel.pp_size * "
         "parallel.num_chunks = 3 * 1 = 3 chunks, in the model's order; or use [] for the even split "
         "(--parallel.layers_per_chunk on the command line)"),
    ),
    "a chunk without anything": (
        ["--parallel.pp_size=4", "--parallel.layers_per_chunk=[2, 2, 0, 4]"],
        ("parallel.layers_per_chunk=[2, 2, 0, 4] leaves chunk 2 (counted from 0) without anything to compute: only "
         "the first, which has the embedding, and the last, which has the head, may have 0 layers; use at least 1 "
         "(--parallel.layers_per_chunk on the command line)"),
    ),
    "an end counts beside a list": (
        ["--parallel.pp_size=2", "--parallel.layers_per_chunk=[5, 3]", "--parallel.counts_head_as_layer=true"],
        ("parallel.counts_head_as_layer=true does nothing: parallel.layers_per_chunk sets the layers of each "
         "chunk; use one of the two (--parallel.counts_head_as_layer on the command line)"),
    ),
    "an end counts in the only chunk": (
        ["--parallel.counts_embedding_as_layer=true"],
        ("parallel.counts_embedding_as_layer=true does nothing: with parallel.pp_size * parallel.num_chunks = 1 there "
         "is only one chunk; use more chunks, or false (--parallel.counts_embedding_as_layer on the command line)"),
    ),
    "layers and ends": (
        ["--parallel.pp_size=4", "--parallel.counts_head_as_layer=true"],
        ("model.num_layers=8 and the head, 9 in all, must be divisible by parallel.pp_size * parallel.num_chunks = "
         "4 * 1 = 4; use num_layers=7 or 11, or pp_size and num_chunks whose product is 1, 3 or 9, or name the "
         "layers of each chunk in parallel.layers_per_chunk (small.toml:5)"),
    ),
    "chunks without interleaving": (
        ["--parallel.pp_size=2", "--parallel.num_chunks=2"],
        ('parallel.num_chunks=2 needs parallel.schedule="interleaved", found "1f1b"; use schedule="interleaved" or '
         "num_chunks=1 (--parallel.num_chunks on the command line)"),
    ),
    "interleaving without chunks": (
        ["--parallel.pp_size=2", "--parallel.schedule=interleaved"],
        ('parallel.schedule="interleaved" needs parallel.num_chunks of at least 2, found 1; use num_chunks=2 or '
         'schedule="1f1b" (--parallel.schedule on the command line)'),
    ),
    "chunks on one stage": (["--parallel.num_chunks=2", "--parallel.schedule=interleaved"], None),
    "chunks on one stage that write one gradient": (
        ["--parallel.num_chunks=2", "--parallel.schedule=interleaved", "--parallel.zero_stage=2"], None,
    ),
    "more layers to offload than a chunk has": (
        ["--parallel.pp_size=2", "--parallel.offload_layers=5"],
        ("parallel.offload_layers=5 must be at most the layers of a chunk, of which none has more than 4 "
         "(model.num_layers=8 over parallel.pp_size * parallel.num_chunks = 2 * 1); use 4 or less "
         "(--parallel.offload_layers on the command line)"),
    ),
    "all layers of a chunk to offload": (["--parallel.pp_size=2", "--parallel.offload_layers=4"], None),
    "all layers of the largest chunk to offload": (
        ["--parallel.pp_size=2", "--parallel.layers_per_chunk=[3, 5]", "--parallel.offload_layers=5"], None,
    ),
    "bf16 gradients": (
        ["--parallel.grad_reduce_dtype=bf16", "--train.precision=fp32"],
        ('parallel.grad_reduce_dtype="bf16" needs train.precision="bf16", found "fp32"; use '
         'grad_reduce_dtype="fp32" or precision="bf16" (--parallel.grad_reduce_dtype on the command line)'),
    ),
    "batch and micro-batch": (
        ["--batch.micro_batch_size=5"],
        "batch.global_batch_size=48 must be divisible by batch.micro_batch_size=5; use 45 or 50 (small.toml:9)",
    ),
    "batch and replicas": (["--batch.micro_batch_size=4", "--parallel.dp_size=5"], None),
    "more replicas than micro-batches": (["--batch.micro_batch_size=4", "--parallel.dp_size=13"], None),
    "ramp-up without increment": (
        ["--batch.rampup_start=16", "--batch.rampup_samples=100"],
        ("batch.rampup_start=16 needs batch.rampup_increment of at least 1, found 0; set rampup_increment, or use "
         "rampup_start=0 for no ramp-up (--batch.rampup_start on the command line)"),
    ),
    "ramp-up without start": (
        ["--batch.rampup_samples=100"],
        ("batch.rampup_samples=100 does nothing with batch.rampup_start=0; set rampup_start or use rampup_samples=0 "
         "(--batch.rampup_samples on the command line)"),
    ),
    "ramp-up from the top": (
        ["--batch.rampup_start=48", "--batch.rampup_increment=8", "--batch.rampup_samples=100"],
        ("batch.rampup_start=48 must be less than batch.global_batch_size=48; use a smaller start, or 0 for no "
         "ramp-up (--batch.rampup_start on the command line)"),
    ),
    "ramp-up that misses the top": (
        ["--batch.rampup_start=16", "--batch.rampup_increment=12", "--batch.rampup_samples=100"],
        ("batch.rampup_increment=12 must divide global_batch_size - rampup_start = 48 - 16 = 32; use "
         "rampup_start=24 or global_batch_size=52 (--batch.rampup_increment on the command line)"),
    ),
    "ramp-up with one increment beyond the top": (
        ["--batch.rampup_start=8", "--batch.rampup_increment=100", "--batch.rampup_samples=100"],
        ("batch.rampup_increment=100 must divide global_batch_size - rampup_start = 48 - 8 = 40; use "
         "global_batch_size=108 (--batch.rampup_increment on the command line)"),
    ),
    "uneven level of the ramp-up": (
        [
            "--batch.rampup_start=8", "--batch.rampup_increment=10", "--batch.rampup_samples=100",
            "--batch.micro_batch_size=4",
        ],
        ("batch.rampup_start=8 with batch.rampup_increment=10 reaches a global batch of 18, which must be divisible by "
         "batch.micro_batch_size=4; use multiples of 4 for both (--batch.rampup_start on the command line)"),
    ),
}  # fmt: skip


def test_rules_of_the_layout(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, CASES)


# tp_size, pp_size and dp_size, the number of processes, and the whole message except its location.
WORLD_SIZES: list[tuple[tuple[int, int, int], int, str | None]] = [
    ((2, 2, 2), 8, None), ((2, 2, 0), 8, None),
    (
        (2, 2, 2), 6,
        ("parallel.dp_size * pp_size * tp_size = 2 * 2 * 2 = 8 must equal the world size of 6 processes; start "
         "8 processes, or use pp_size and tp_size whose product is 1, 2, 3 or 6"),
    ),
    (
        (2, 2, 2), 12,
        ("parallel.dp_size * pp_size * tp_size = 2 * 2 * 2 = 8 must equal the world size of 12 processes; "
         "start 8 processes, or set dp_size=3, or 0 to have it follow the world size"),
    ),
    (
        (2, 2, 0), 6,
        ("parallel.pp_size * tp_size = 2 * 2 = 4 must divide the world size of 6 processes; start 4 or 8 "
         "processes, or use pp_size and tp_size whose product is 1, 2, 3 or 6"),
    ),
]  # fmt: skip


def test_world_size_must_fit_the_layout(problems_of: ProblemsOf) -> None:
    for (tp_size, pp_size, dp_size), world_size, expected in WORLD_SIZES:
        sizes = {"tp_size": tp_size, "pp_size": pp_size, "dp_size": dp_size}
        found = problems_of(*(f"--parallel.{name}={size}" for name, size in sizes.items()), world_size=world_size)
        location = f" (--parallel.{'dp_size' if dp_size else 'pp_size'} on the command line)"
        assert found == (() if expected is None else (expected + location,)), (sizes, world_size)


def test_world_size_decides_an_open_dp_size(problems_of: ProblemsOf) -> None:
    pipeline = ("--parallel.pp_size=4", "--parallel.schedule=zero_bubble")
    assert problems_of(*pipeline) == problems_of(*pipeline, world_size=60) == ()
    (problem,) = problems_of(*pipeline, world_size=64)
    assert problem.startswith("batch.global_batch_size=48: num_microbatches=3 ")


def test_batch_is_checked_as_far_as_the_layout_is_known(problems_of: ProblemsOf) -> None:
    for size in ("dp_size", "tp_size", "pp_size"):
        problems = problems_of(f"--parallel.{size}=many", "--batch.micro_batch_size=5", world_size=8)
        assert [problem.partition(";")[0] for problem in problems[1:]] == [
            "batch.global_batch_size=48 must be divisible by batch.micro_batch_size=5"
        ], size


def test_profiled_rank_beyond_the_world(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of("--profile.ranks=[0, 8]", "--profile.num_steps=3", world_size=8)
    assert problem.startswith(
        "profile.ranks=[0, 8] must be ranks of this run, found 8 with a world size of 8; use ranks"
    )


INTERLEAVED = ["--parallel.pp_size=4", "--parallel.num_chunks=2", "--parallel.schedule=interleaved"]


def test_too_few_micro_batches(problems_of: ProblemsOf) -> None:
    # 15 replicas: three of them have 4 micro-batches, the others 3 and an empty one
    for dp_size in (12, 13, 15):
        assert problems_of(*INTERLEAVED, f"--parallel.dp_size={dp_size}") == ()

    (problem,) = problems_of(*INTERLEAVED, "--parallel.dp_size=16")
    assert problem.startswith("batch.global_batch_size=48: num_microbatches=3 ")
    assert problem.endswith("; the smallest batch that fills every pipeline is 64 (small.toml:9)")


def test_too_few_micro_batches_at_a_level_of_the_ramp_up(problems_of: ProblemsOf) -> None:
    rampup = ["--batch.rampup_start=12", "--batch.rampup_increment=12", "--batch.rampup_samples=100"]
    (problem,) = problems_of(*INTERLEAVED, *rampup, "--parallel.dp_size=4")

    assert problem.startswith("batch.global_batch_size=48 (level 12 of the ramp-up): num_microbatches=3 ")
    assert "; the smallest batch that fills every pipeline is 16 (" in problem


def test_an_open_dp_size_is_taken_as_the_most_lenient(problems_of: ProblemsOf) -> None:
    too_few = "--batch.global_batch_size=2"
    expected = (
        "batch.global_batch_size=2 with dp_size=1, which is assumed as the most lenient case: num_microbatches=2 "
        "(batch.global_batch_size / (batch.micro_batch_size * dp_size), rounded up) must be at least "
        'parallel.pp_size=4 for parallel.schedule="interleaved", or every change of chunk stalls the pipeline; raise '
        'batch.global_batch_size to 4 micro-batches or use schedule="1f1b"; the smallest batch that fills every '
        "pipeline is 4 (--batch.global_batch_size on the command line)"
    )
    assert problems_of(*INTERLEAVED, too_few) == (expected,)
    assert problems_of(*INTERLEAVED, "--batch.global_batch_size=4") == ()

    # together with other errors, and with an invalid dp_size
    problems = problems_of(*INTERLEAVED, too_few, "--log.interval=0", "--parallel.dp_size=many")
    assert [problem.partition(" ")[0] for problem in problems] == [
        'parallel.dp_size="many"',
        "log.interval=0",
        "batch.global_batch_size=2",
    ]

    (problem,) = problems_of(*INTERLEAVED, too_few, "--parallel.dp_size=0", world_size=4)
    assert problem.startswith("batch.global_batch_size=2: num_microbatches=2 ")
    assert problems_of(*INTERLEAVED, "--batch.global_batch_size=4", world_size=8) != ()


def test_each_tensor_parallel_rule_suggests_valid_sizes(problems_of: ProblemsOf) -> None:
    problems = problems_of("--parallel.tp_size=3", "--model.num_kv_heads=4")

    assert [problem.partition(" must divide ")[2].partition(";")[0] for problem in problems] == [
        "model.num_heads=20",
        "model.num_kv_heads=4 or be a multiple of it",
        "model.ffn_size=640",
        "the padded vocabulary of 1024 (model.vocab_size=1000 rounded up to model.vocab_multiple=128)",
        "model.seq_len=64 (sequence parallelism)",
    ]
    assert all("; use 1, 2 or 4" in problem for problem in problems)
