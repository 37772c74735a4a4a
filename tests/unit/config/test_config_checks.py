"""The rules between keys: each message names keys, values, rule, way out and place."""

from __future__ import annotations

import pytest

# What is set, and the whole of the one message that follows. The place is that of the first key that somebody wrote.
CASES = {
    "tp and heads": (
        ["--parallel.tp_size=8", "--model.seq_len=128"],
        "parallel.tp_size=8 must divide model.num_heads=20; use 1, 2 or 4 (--parallel.tp_size on the command line)",
    ),
    "tp and key-value heads": (
        ["--parallel.tp_size=4", "--model.num_kv_heads=10"],
        "parallel.tp_size=4 must divide model.num_kv_heads=10; use 1 or 2 (--parallel.tp_size on the command line)",
    ),
    "tp and feed-forward": (
        ["--parallel.tp_size=4", "--model.ffn_size=414"],
        "parallel.tp_size=4 must divide model.ffn_size=414; use 1 or 2 (--parallel.tp_size on the command line)",
    ),
    "tp and vocabulary": (
        ["--parallel.tp_size=4", "--model.vocab_multiple=2"],
        None,
    ),
    "tp and odd vocabulary": (
        ["--parallel.tp_size=4", "--model.vocab_size=1001", "--model.vocab_multiple=1"],
        (
            "parallel.tp_size=4 must divide the padded vocabulary of 1001 (model.vocab_size=1001 rounded up to "
            "model.vocab_multiple=1); use 1, or model.vocab_multiple=4 (--parallel.tp_size on the command line)"
        ),
    ),
    "tp and sequence": (
        ["--parallel.tp_size=4", "--model.seq_len=62"],
        (
            "parallel.tp_size=4 must divide model.seq_len=62 (sequence parallelism); use 1 or 2 "
            "(--parallel.tp_size on the command line)"
        ),
    ),
    "grouped heads": (
        ["--model.num_kv_heads=8"],
        (
            "model.num_kv_heads=8 must divide model.num_heads=20; use 1, 2, 4, 5, 10 or 20 "
            "(--model.num_kv_heads on the command line)"
        ),
    ),
    "heads and width": (
        ["--model.hidden_size=162"],
        (
            "model.num_heads=20 must divide model.hidden_size=162; use 1, 2, 3, 6, 9, 18, 27 or 54, "
            "hidden_size 160 or 180, or set model.head_dim (small.toml:6)"
        ),
    ),
    "keeping of all checkpoints": (
        ["--checkpoint.keep_every=100", "--checkpoint.interval=50"],
        (
            "checkpoint.keep_every=100 does nothing with checkpoint.keep_last=-1, which keeps all; "
            "use keep_last=2 or keep_every=0 (--checkpoint.keep_every on the command line)"
        ),
    ),
    "keeping of checkpoints that are never taken": (
        ["--checkpoint.keep_every=100", "--checkpoint.keep_last=2", "--checkpoint.interval=30"],
        (
            "checkpoint.keep_every=100 must be a multiple of checkpoint.interval=30, or no checkpoint falls on it; "
            "use 90 or 120 (--checkpoint.keep_every on the command line)"
        ),
    ),
    "explicit head width": (["--model.hidden_size=162", "--model.head_dim=8"], None),
    "rotary head width": (
        ["--model.head_dim=7", "--model.positions=rope"],
        (
            'model.head_dim=7 must be even for model.positions="rope", which turns pairs; use 6 or 8 '
            "(--model.head_dim on the command line)"
        ),
    ),
    "odd head without rotary": (["--model.head_dim=7"], None),
    "rotary scaling without rotary": (
        ["--model.rope_scaling=linear"],
        (
            'model.rope_scaling="linear" needs model.positions="rope", found "learned"; use positions="rope" or '
            'rope_scaling="none" (--model.rope_scaling on the command line)'
        ),
    ),
    "unused scaling factor": (
        ["--model.positions=rope", "--model.rope_scaling_factor=2"],
        (
            'model.rope_scaling_factor=2.0 does nothing with model.rope_scaling="none"; use rope_scaling="linear" or '
            '"llama3", or rope_scaling_factor=1.0 (--model.rope_scaling_factor on the command line)'
        ),
    ),
    "llama3 factors": (
        [
            "--model.positions=rope",
            "--model.rope_scaling=llama3",
            "--model.rope_scaling_factor=8",
            "--model.rope_low_freq_factor=4",
        ],
        (
            "model.rope_low_freq_factor=4.0 must be less than model.rope_high_freq_factor=4.0; Llama 3.1 has 1.0 and "
            "4.0 (--model.rope_low_freq_factor on the command line)"
        ),
    ),
    "scaling by nothing": (
        ["--model.positions=rope", "--model.rope_scaling=linear"],
        (
            'model.rope_scaling_factor=1.0 leaves model.rope_scaling="linear" without effect; use a factor above 1 '
            '(Llama 3.1 has 8.0) or rope_scaling="none" (--model.rope_scaling on the command line)'
        ),
    ),
    "llama3 key of linear scaling": (
        [
            "--model.positions=rope",
            "--model.rope_scaling=linear",
            "--model.rope_scaling_factor=8",
            "--model.rope_low_freq_factor=2",
        ],
        (
            'model.rope_low_freq_factor=2.0 does nothing with model.rope_scaling="linear"; use rope_scaling="llama3" '
            "or rope_low_freq_factor=1.0 (--model.rope_low_freq_factor on the command line)"
        ),
    ),
    "llama3 key without scaling": (
        ["--model.positions=rope", "--model.rope_high_freq_factor=8"],
        (
            'model.rope_high_freq_factor=8.0 does nothing with model.rope_scaling="none"; use rope_scaling="llama3" '
            "or rope_high_freq_factor=4.0 (--model.rope_high_freq_factor on the command line)"
        ),
    ),
    "llama3 length without rotary": (
        ["--model.rope_original_seq_len=32"],
        (
            'model.rope_original_seq_len=32 does nothing with model.rope_scaling="none"; use rope_scaling="llama3" '
            "or rope_original_seq_len=8192 (--model.rope_original_seq_len on the command line)"
        ),
    ),
    "llama3 with all of its keys": (
        [
            "--model.positions=rope",
            "--model.rope_theta=500000",
            "--model.rope_scaling=llama3",
            "--model.rope_scaling_factor=8",
            "--model.rope_low_freq_factor=2",
            "--model.rope_high_freq_factor=8",
            "--model.rope_original_seq_len=32",
        ],
        None,
    ),
    "rotary base without rotary": (
        ["--model.rope_theta=500000"],
        (
            'model.rope_theta=500000.0 does nothing with model.positions="learned"; use positions="rope" or '
            "rope_theta=10000.0 (--model.rope_theta on the command line)"
        ),
    ),
    "window": (
        ["--model.window_size=65"],
        (
            "model.window_size=65 must be at most model.seq_len=64; use 64 or less, or 0 for no window "
            "(--model.window_size on the command line)"
        ),
    ),
    "window of the whole sequence": (["--model.window_size=64"], None),
    "layers and stages": (
        ["--parallel.pp_size=3"],
        (
            "model.num_layers=8 must be divisible by parallel.pp_size * parallel.num_chunks = 3 * 1 = 3; use "
            "num_layers=6 or 9, or pp_size and num_chunks whose product is 1, 2, 4 or 8 (small.toml:5)"
        ),
    ),
    "layers and chunks": (
        ["--parallel.pp_size=2", "--parallel.num_chunks=3", "--parallel.schedule=interleaved"],
        (
            "model.num_layers=8 must be divisible by parallel.pp_size * parallel.num_chunks = 2 * 3 = 6; use "
            "num_layers=6 or 12, or pp_size and num_chunks whose product is 1, 2, 4 or 8 (small.toml:5)"
        ),
    ),
    "more stages than layers": (
        ["--parallel.pp_size=16"],
        (
            "model.num_layers=8 must be divisible by parallel.pp_size * parallel.num_chunks = 16 * 1 = 16; use "
            "num_layers=16, or pp_size and num_chunks whose product is 1, 2, 4 or 8 (small.toml:5)"
        ),
    ),
    "chunks without interleaving": (
        ["--parallel.pp_size=2", "--parallel.num_chunks=2"],
        (
            'parallel.num_chunks=2 needs parallel.schedule="interleaved", found "1f1b"; use schedule="interleaved" or '
            "num_chunks=1 (--parallel.num_chunks on the command line)"
        ),
    ),
    "interleaving without chunks": (
        ["--parallel.pp_size=2", "--parallel.schedule=interleaved"],
        (
            'parallel.schedule="interleaved" needs parallel.num_chunks of at least 2, found 1; use num_chunks=2 or '
            'schedule="1f1b" (--parallel.schedule on the command line)'
        ),
    ),
    "chunks on one stage": (["--parallel.num_chunks=2", "--parallel.schedule=interleaved"], None),
    "chunks on one stage that write one gradient": (
        ["--parallel.num_chunks=2", "--parallel.schedule=interleaved", "--parallel.zero_stage=2"],
        (
            "parallel.zero_stage=2 keeps whole gradients of one chunk at a time; with model.has_tied_head=true and "
            "parallel.num_chunks=2 on one stage, two chunks write one gradient; use zero_stage=1, num_chunks=1 or "
            "has_tied_head=false (--parallel.zero_stage on the command line)"
        ),
    ),
    "bf16 gradients": (
        ["--parallel.grad_reduce_dtype=bf16", "--train.precision=fp32"],
        (
            'parallel.grad_reduce_dtype="bf16" needs train.precision="bf16", found "fp32"; use '
            'grad_reduce_dtype="fp32" or precision="bf16" (--parallel.grad_reduce_dtype on the command line)'
        ),
    ),
    "batch and micro-batch": (
        ["--batch.micro_batch_size=5"],
        "batch.global_batch_size=48 must be divisible by batch.micro_batch_size=5; use 45 or 50 (small.toml:9)",
    ),
    "batch and replicas": (
        ["--batch.micro_batch_size=4", "--parallel.dp_size=5"],
        (
            "batch.global_batch_size=48 must be divisible by batch.micro_batch_size * dp_size = 4 * 5 = 20; use 40 or "
            "60 (small.toml:9)"
        ),
    ),
    "ramp-up without increment": (
        ["--batch.rampup_start=16", "--batch.rampup_samples=100"],
        (
            "batch.rampup_start=16 needs batch.rampup_increment of at least 1, found 0; set rampup_increment, or use "
            "rampup_start=0 for no ramp-up (--batch.rampup_start on the command line)"
        ),
    ),
    "ramp-up without start": (
        ["--batch.rampup_samples=100"],
        (
            "batch.rampup_samples=100 does nothing with batch.rampup_start=0; set rampup_start or use rampup_samples=0 "
            "(--batch.rampup_samples on the command line)"
        ),
    ),
    "ramp-up from the top": (
        ["--batch.rampup_start=48", "--batch.rampup_increment=8", "--batch.rampup_samples=100"],
        (
            "batch.rampup_start=48 must be less than batch.global_batch_size=48; use a smaller start, or 0 for no "
            "ramp-up (--batch.rampup_start on the command line)"
        ),
    ),
    "ramp-up that misses the top": (
        ["--batch.rampup_start=16", "--batch.rampup_increment=12", "--batch.rampup_samples=100"],
        (
            "batch.rampup_increment=12 must divide global_batch_size - rampup_start = 48 - 16 = 32; use "
            "rampup_start=24 or global_batch_size=52 (--batch.rampup_increment on the command line)"
        ),
    ),
    "uneven level of the ramp-up": (
        [
            "--batch.rampup_start=8",
            "--batch.rampup_increment=10",
            "--batch.rampup_samples=100",
            "--batch.micro_batch_size=4",
        ],
        (
            "batch.rampup_start=8 with batch.rampup_increment=10 reaches a global batch of 18, which must be "
            "divisible by batch.micro_batch_size=4; use multiples of 4 for both (--batch.rampup_start on the command "
            "line)"
        ),
    ),
    "rates": (
        ["--optimizer.min_lr=0.1"],
        (
            "optimizer.min_lr=0.1 must be at most optimizer.lr=0.001; use 0.0001 (a tenth of lr) or 0 "
            "(--optimizer.min_lr on the command line)"
        ),
    ),
    "warm-up as long as the run": (
        ["--optimizer.lr_warmup_steps=100"],
        (
            "optimizer.lr_warmup_steps=100 must be less than train.steps=100; use 99 or less, or a train.steps of at "
            "least 101 (--optimizer.lr_warmup_steps on the command line)"
        ),
    ),
    "constant rate after a whole warm-up": (
        ["--optimizer.lr_warmup_steps=100", "--optimizer.lr_schedule=constant"],
        None,
    ),
    "constant rate with a longer warm-up": (
        ["--optimizer.lr_warmup_steps=101", "--optimizer.lr_schedule=constant"],
        (
            "optimizer.lr_warmup_steps=101 must be at most train.steps=100; use 100 or less, or a train.steps of at "
            "least 101 (--optimizer.lr_warmup_steps on the command line)"
        ),
    ),
    "a first part of a longer run": (
        ["--optimizer.lr_warmup_steps=200", "--optimizer.lr_decay_steps=1000"],
        None,
    ),
    "wsd without decay": (
        ["--optimizer.lr_schedule=wsd"],
        (
            'optimizer.wsd_decay_steps=0 leaves optimizer.lr_schedule="wsd" without its decay; use 10 (a tenth of the '
            "run) or another schedule (--optimizer.lr_schedule on the command line)"
        ),
    ),
    "wsd too long": (
        ["--optimizer.lr_schedule=wsd", "--optimizer.wsd_decay_steps=60", "--optimizer.lr_warmup_steps=50"],
        (
            "optimizer.lr_warmup_steps + optimizer.wsd_decay_steps = 50 + 60 = 110 must be at most train.steps=100; "
            "use wsd_decay_steps=50 or lr_warmup_steps=40 or less, or more steps (--optimizer.wsd_decay_steps on the "
            "command line)"
        ),
    ),
    "decay of another schedule": (
        ["--optimizer.wsd_decay_steps=10"],
        (
            'optimizer.wsd_decay_steps=10 does nothing with optimizer.lr_schedule="cosine"; use lr_schedule="wsd" or '
            "wsd_decay_steps=0 (--optimizer.wsd_decay_steps on the command line)"
        ),
    ),
    "decay of a constant rate": (
        ["--optimizer.lr_decay_steps=50", "--optimizer.lr_schedule=constant"],
        (
            'optimizer.lr_decay_steps=50 does nothing with optimizer.lr_schedule="constant"; use lr_decay_steps=0 or '
            "another schedule (--optimizer.lr_decay_steps on the command line)"
        ),
    ),
    "floor of a constant rate": (
        ["--optimizer.min_lr=1e-4", "--optimizer.lr_schedule=constant"],
        (
            'optimizer.min_lr=0.0001 does nothing with optimizer.lr_schedule="constant"; use min_lr=0.0 or another '
            "schedule (--optimizer.min_lr on the command line)"
        ),
    ),
    "number of samples without data": (
        ["--evaluation.num_samples=10"],
        (
            'evaluation.num_samples=10 needs data.validation, found ""; set data.validation to the path of held-out '
            "tokens, or use evaluation.num_samples=0 (--evaluation.num_samples on the command line)"
        ),
    ),
    "number of samples with data": (["--evaluation.num_samples=10", "--data.validation=held_out"], None),
    "evaluation without data": (
        ["--evaluation.interval=10"],
        (
            'evaluation.interval=10 needs data.validation, found ""; set data.validation to the path of held-out '
            "tokens, or use evaluation.interval=0 (--evaluation.interval on the command line)"
        ),
    ),
    "W&B without a project": (
        ["--log.has_wandb=true", "--log.wandb_project="],
        (
            'log.wandb_project="" must be a name when log.has_wandb=true; use "megatrain" or has_wandb=false '
            "(--log.wandb_project on the command line)"
        ),
    ),
    "project of no W&B": (
        ["--log.wandb_project=llm"],
        (
            'log.wandb_project="llm" does nothing with log.has_wandb=false; use has_wandb=true or '
            'wandb_project="megatrain" (--log.wandb_project on the command line)'
        ),
    ),
    "project of W&B": (["--log.wandb_project=llm", "--log.has_wandb=true"], None),
    "metrics for everybody": (
        ["--diagnostics.metrics_address=0.0.0.0"],
        (
            'diagnostics.metrics_address="0.0.0.0" is reached from other machines and needs '
            'diagnostics.metrics_token_file, found ""; name a file with a token, or use metrics_address="127.0.0.1" '
            "(--diagnostics.metrics_address on the command line)"
        ),
    ),
    "metrics by name": (
        ["--diagnostics.metrics_address=node-7"],
        (
            'diagnostics.metrics_address="node-7" is reached from other machines and needs '
            'diagnostics.metrics_token_file, found ""; name a file with a token, or use metrics_address="127.0.0.1" '
            "(--diagnostics.metrics_address on the command line)"
        ),
    ),
    "metrics with a token": (
        ["--diagnostics.metrics_address=0.0.0.0", "--diagnostics.metrics_token_file=token"],
        None,
    ),
    "metrics of this machine": (["--diagnostics.metrics_address=::1"], None),
    "one port for two": (
        ["--diagnostics.metrics_port=9000", "--diagnostics.daemon_port=9000"],
        (
            "diagnostics.metrics_port and diagnostics.daemon_port are both 9000, and one host needs both; use another "
            "metrics_port, or 0 for any that is free (--diagnostics.metrics_port on the command line)"
        ),
    ),
    "a page for everybody": (
        ["--dashboard.address=0.0.0.0"],
        (
            'dashboard.address="0.0.0.0" is reached from other machines and needs to know who asks: set '
            'dashboard.viewer_token_file or operator_token_file, or trusted_proxies, or use address="127.0.0.1" '
            "(--dashboard.address on the command line)"
        ),
    ),
    "a page with a token": (["--dashboard.address=0.0.0.0", "--dashboard.viewer_token_file=token"], None),
    "actions for nobody": (
        ["--dashboard.enable_actions=true", "--dashboard.viewer_token_file=token"],
        (
            "dashboard.enable_actions=true lets operators act, and nobody can be one; set "
            "dashboard.operator_token_file, or role_header with trusted_proxies, or use enable_actions=false "
            "(--dashboard.enable_actions on the command line)"
        ),
    ),
    "a port for page and metrics": (
        ["--diagnostics.daemon_metrics_port=8777"],
        (
            "dashboard.port and diagnostics.daemon_metrics_port are both 8777, and one host needs both; use another "
            "dashboard.port, or 0 for any that is free (--diagnostics.daemon_metrics_port on the command line)"
        ),
    ),
    "profile without steps": (
        ["--profile.ranks=[0]"],
        (
            "profile.ranks=[0] and profile.num_steps=0 must be set together; use ranks=[0] with num_steps=3, or [] "
            "with 0 for no profile (--profile.ranks on the command line)"
        ),
    ),
    "profile after the end": (
        ["--profile.ranks=[0]", "--profile.first_step=98", "--profile.num_steps=3"],
        (
            "profile.first_step + profile.num_steps = 98 + 3 = 101 must be at most train.steps=100; use first_step=97 "
            "or less (--profile.first_step on the command line)"
        ),
    ),
    "rank profiled twice": (
        ["--profile.ranks=[1, 0, 1]", "--profile.num_steps=3"],
        "profile.ranks=[1, 0, 1] must not repeat a rank; use [0, 1] (--profile.ranks on the command line)",
    ),
    "copies at peers without stages": (
        ["--checkpoint.has_peer_copies=true"],
        (
            "checkpoint.has_peer_copies=true needs parallel.pp_size above 1, found 1: there is no rank outside the own "
            "groups; use pp_size=2 or more, or has_peer_copies=false (--checkpoint.has_peer_copies on the command line)"
        ),
    ),
    "copies at peers without replicas": (
        ["--checkpoint.has_peer_copies=true", "--parallel.pp_size=2", "--parallel.dp_size=1"],
        (
            "checkpoint.has_peer_copies=true needs parallel.dp_size above 1, found 1: there is no rank outside the own "
            "groups; use dp_size=2 or more, or has_peer_copies=false (--checkpoint.has_peer_copies on the command line)"
        ),
    ),
    "copies at peers": (
        ["--checkpoint.has_peer_copies=true", "--parallel.pp_size=2", "--parallel.dp_size=2"],
        None,
    ),
    "fp64 on a GPU": (["--train.precision=fp64", "--runtime.device=cuda"], None),
}


@pytest.mark.parametrize(("overrides", "expected"), CASES.values(), ids=CASES.keys())
def test_rule(problems_of, overrides: list[str], expected: str | None) -> None:
    assert problems_of(*overrides) == (() if expected is None else (expected,))


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("model.dropout=1.0", "is out of range; use a value >= 0 and < 1"),
        ("model.window_size=-1", "is out of range; use a value >= 0"),
        ("optimizer.beta1=-0.1", "is out of range; use a value >= 0 and < 1"),
        ("optimizer.beta2=1.0", "is out of range; use a value >= 0 and < 1"),
        ("optimizer.lr=0.0", "is out of range; use a value > 0 and <= 1000"),
        ("optimizer.lr=nan", "is out of range; use a value > 0 and <= 1000"),
        ("optimizer.lr=inf", "is out of range; use a value > 0 and <= 1000"),
        ("parallel.tp_size=0", "is out of range; use a value >= 1 and <= 10000000"),
        ("parallel.zero_stage=3", "is not allowed; use 1 or 2"),
        ('parallel.schedule="zb"', 'is not allowed; use "gpipe", "1f1b", "interleaved" or "zero_bubble"'),
        ("runtime.step_timeout_s=0.0", "is out of range; use a value > 0 and <= 1000000000"),
        ("profile.ranks=[0, -1, -2]", "is out of range: element 2 is -1; use values >= 0"),
        ('profile.ranks=[0, -1, "a"]', 'must be a list of integers, such as [0, 8]; element 3 is "a", a string'),
        ("train.max_skipped_steps=0", "is out of range; use a value >= 1 and <= 2147483647"),
        ('job.name="../x"', "is not allowed; use text of the form [A-Za-z0-9][A-Za-z0-9._-]*"),
        ("telemetry.black_box_records=0", "is out of range; use a value >= 256 and <= 16777216"),
        ('data.tokenizer="\udcff"', "holds bytes that are not UTF-8; use text in UTF-8"),
    ],
)
def test_range_of_one_key(problems_of, setting: str, rule: str) -> None:
    key = setting.partition("=")[0]
    assert problems_of(f"--{setting}") == (f"{setting} {rule} (--{key} on the command line)",)


@pytest.mark.parametrize(
    ("sizes", "world_size", "expected"),
    [
        ((2, 2, 2), 8, None),
        ((2, 2, 0), 8, None),
        (
            (2, 2, 2),
            6,
            (
                "parallel.tp_size * pp_size * dp_size = 2 * 2 * 2 = 8 must equal the world size of 6 processes; start "
                "8 processes, or use tp_size and pp_size whose product is 1, 2, 3 or 6"
            ),
        ),
        (
            (2, 2, 2),
            12,
            (
                "parallel.tp_size * pp_size * dp_size = 2 * 2 * 2 = 8 must equal the world size of 12 processes; "
                "start 8 processes, or set dp_size=3, or 0 to have it follow the world size"
            ),
        ),
        (
            (2, 2, 0),
            6,
            (
                "parallel.tp_size * pp_size = 2 * 2 = 4 must divide the world size of 6 processes; start 4 or 8 "
                "processes, or use tp_size and pp_size whose product is 1, 2, 3 or 6"
            ),
        ),
    ],
)
def test_world_size(problems_of, sizes: tuple[int, int, int], world_size: int, expected: str | None) -> None:
    tp_size, pp_size, dp_size = sizes
    overrides = [f"--parallel.tp_size={tp_size}", f"--parallel.pp_size={pp_size}", f"--parallel.dp_size={dp_size}"]
    found = problems_of(*overrides, world_size=world_size)

    place = " (--parallel.dp_size on the command line)" if dp_size else " (--parallel.tp_size on the command line)"
    assert found == (() if expected is None else (expected + place,))


def test_world_size_decides_an_open_dp_size(problems_of) -> None:
    assert problems_of("--batch.micro_batch_size=4") == ()
    (problem,) = problems_of("--batch.micro_batch_size=4", world_size=5)
    assert "divisible by batch.micro_batch_size * dp_size = 4 * 5 = 20; use 40 or 60 (small.toml:9)" in problem


@pytest.mark.parametrize("wrong", ["--parallel.dp_size=many", "--parallel.tp_size=many", "--parallel.pp_size=many"])
def test_batch_is_checked_as_far_as_the_layout_is_known(problems_of, wrong: str) -> None:
    problems = problems_of(wrong, "--batch.micro_batch_size=5", world_size=8)
    assert [problem.partition(";")[0] for problem in problems[1:]] == [
        "batch.global_batch_size=48 must be divisible by batch.micro_batch_size=5"
    ]


def test_profiled_rank_beyond_the_world(problems_of) -> None:
    (problem,) = problems_of("--profile.ranks=[0, 8]", "--profile.num_steps=3", world_size=8)
    assert problem.startswith(
        "profile.ranks=[0, 8] must be ranks of this run, found 8 with a world size of 8; use ranks"
    )


INTERLEAVED = ["--parallel.pp_size=4", "--parallel.num_chunks=2", "--parallel.schedule=interleaved"]


def test_too_few_micro_batches(problems_of) -> None:
    assert problems_of(*INTERLEAVED, "--parallel.dp_size=12") == ()

    (problem,) = problems_of(*INTERLEAVED, "--parallel.dp_size=16")
    assert problem.startswith("batch.global_batch_size=48: num_microbatches=3 ")
    assert problem.endswith("; the smallest batch that fits is 64 (small.toml:9)")


def test_too_few_micro_batches_at_a_level_of_the_ramp_up(problems_of) -> None:
    rampup = ["--batch.rampup_start=12", "--batch.rampup_increment=12", "--batch.rampup_samples=100"]
    (problem,) = problems_of(*INTERLEAVED, *rampup, "--parallel.dp_size=4")

    assert problem.startswith("batch.global_batch_size=48 (level 12 of the ramp-up): num_microbatches=3 ")
    assert "; the smallest batch that fits is 16 (" in problem


def test_an_open_dp_size_is_taken_as_the_most_lenient(problems_of) -> None:
    too_few = "--batch.global_batch_size=2"
    expected = (
        "batch.global_batch_size=2 with dp_size=1, which is assumed as the most lenient case: num_microbatches=2 "
        "(batch.global_batch_size / (batch.micro_batch_size * dp_size)) must be at least parallel.pp_size=4 for "
        "parallel.schedule='interleaved', or every change of chunk stalls the pipeline; raise "
        "batch.global_batch_size to 4 microbatches or use schedule='1f1b'; the smallest batch that fits is 4 "
        "(--batch.global_batch_size on the command line)"
    )
    assert problems_of(*INTERLEAVED, too_few) == (expected,)
    assert problems_of(*INTERLEAVED, "--batch.global_batch_size=4") == ()

    # together with other mistakes, and with a dp_size that cannot be used
    problems = problems_of(*INTERLEAVED, too_few, "--log.interval=0", "--parallel.dp_size=many")
    assert [problem.partition(" ")[0] for problem in problems] == [
        'parallel.dp_size="many"',
        "log.interval=0",
        "batch.global_batch_size=2",
    ]

    (problem,) = problems_of(*INTERLEAVED, too_few, "--parallel.dp_size=0", world_size=4)
    assert problem.startswith("batch.global_batch_size=2: num_microbatches=2 ")
    assert problems_of(*INTERLEAVED, "--batch.global_batch_size=4", world_size=8) != ()


def test_every_tensor_parallel_rule_is_reported_with_sizes_that_satisfy_all(problems_of) -> None:
    problems = problems_of("--parallel.tp_size=3", "--model.num_kv_heads=4")

    assert [problem.partition(" must divide ")[2].partition(";")[0] for problem in problems] == [
        "model.num_heads=20",
        "model.num_kv_heads=4",
        "model.ffn_size=640",
        "the padded vocabulary of 1024 (model.vocab_size=1000 rounded up to model.vocab_multiple=128)",
        "model.seq_len=64 (sequence parallelism)",
    ]
    assert all("; use 1, 2 or 4" in problem for problem in problems)
