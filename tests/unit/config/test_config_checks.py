"""The rules between keys: each message names keys, values, rule, hint and place."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf, assert_rules

# The arguments and the whole message. Its location is that of the first key that the user set.
CASES = {
    "keeping of all checkpoints": (
        ["--checkpoint.keep_every=100", "--checkpoint.interval=50"],
        ("checkpoint.keep_every=100 does nothing with checkpoint.keep_last=-1, which keeps all; "
         "use keep_last=2 or keep_every=0 (--checkpoint.keep_every on the command line)"),
    ),
    "keeping of checkpoints that are taken by time": (
        ["--checkpoint.keep_every=100"],
        ("checkpoint.keep_every=100 needs checkpoint.interval, found 0: checkpoints that are taken by time fall on "
         "any step; use interval=100 or keep_every=0 (--checkpoint.keep_every on the command line)"),
    ),
    "keeping of every second checkpoint": (
        ["--checkpoint.keep_every=100", "--checkpoint.interval=50", "--checkpoint.keep_last=2"], None,
    ),
    "keeping of checkpoints that are never taken": (
        ["--checkpoint.keep_every=100", "--checkpoint.keep_last=2", "--checkpoint.interval=30"],
        ("checkpoint.keep_every=100 must be a multiple of checkpoint.interval=30, or some of its multiples have "
         "no checkpoint; use 90 or 120 (--checkpoint.keep_every on the command line)"),
    ),
    "copies at peers without stages": (
        ["--checkpoint.has_peer_copies=true"],
        ("checkpoint.has_peer_copies=true needs parallel.pp_size above 1, found 1: a copy is kept by a rank with "
         "another pp_rank and another dp_rank; use pp_size=2 or more, or has_peer_copies=false "
         "(--checkpoint.has_peer_copies on the command line)"),
    ),
    "copies at peers without replicas": (
        ["--checkpoint.has_peer_copies=true", "--parallel.pp_size=2", "--parallel.dp_size=1"],
        ("checkpoint.has_peer_copies=true needs parallel.dp_size above 1, found 1: a copy is kept by a rank with "
         "another pp_rank and another dp_rank; use dp_size=2 or more, or has_peer_copies=false "
         "(--checkpoint.has_peer_copies on the command line)"),
    ),
    "copies at peers": (["--checkpoint.has_peer_copies=true", "--parallel.pp_size=2", "--parallel.dp_size=2"], None),
    "rates": (
        ["--optimizer.min_lr=0.1"],
        ("optimizer.min_lr=0.1 must be at most optimizer.lr=0.001; use 0.0001 (a tenth of lr) or 0 "
         "(--optimizer.min_lr on the command line)"),
    ),
    "warm-up as long as the run": (
        ["--optimizer.lr_warmup_steps=100"],
        ("optimizer.lr_warmup_steps=100 must be less than train.steps=100; use 99 or less, or train.steps of at "
         "least 101 (--optimizer.lr_warmup_steps on the command line)"),
    ),
    "constant rate after a whole warm-up": (
        ["--optimizer.lr_warmup_steps=100", "--optimizer.lr_schedule=constant"], None,
    ),
    "constant rate with a longer warm-up": (
        ["--optimizer.lr_warmup_steps=101", "--optimizer.lr_schedule=constant"],
        ("optimizer.lr_warmup_steps=101 must be at most train.steps=100; use 100 or less, or train.steps of at "
         "least 101 (--optimizer.lr_warmup_steps on the command line)"),
    ),
    "a first part of a longer run": (["--optimizer.lr_warmup_steps=200", "--optimizer.lr_decay_steps=1000"], None),
    "wsd without decay": (
        ["--optimizer.lr_schedule=wsd"],
        ('optimizer.wsd_decay_steps=0 leaves optimizer.lr_schedule="wsd" without its decay; use 10 (a tenth of the '
         "run) or another schedule (--optimizer.lr_schedule on the command line)"),
    ),
    "wsd too long": (
        ["--optimizer.lr_schedule=wsd", "--optimizer.wsd_decay_steps=60", "--optimizer.lr_warmup_steps=50"],
        ("optimizer.lr_warmup_steps + optimizer.wsd_decay_steps = 50 + 60 = 110 must be at most train.steps=100; "
         "use wsd_decay_steps=50 or lr_warmup_steps=40 or less, or more steps (--optimizer.wsd_decay_steps on the "
         "command line)"),
    ),
    "decay of another schedule": (
        ["--optimizer.wsd_decay_steps=10"],
        ('optimizer.wsd_decay_steps=10 does nothing with optimizer.lr_schedule="cosine"; use lr_schedule="wsd" or '
         "wsd_decay_steps=0 (--optimizer.wsd_decay_steps on the command line)"),
    ),
    "decay of a constant rate": (
        ["--optimizer.lr_decay_steps=50", "--optimizer.lr_schedule=constant"],
        ('optimizer.lr_decay_steps=50 does nothing with optimizer.lr_schedule="constant"; use lr_schedule="cosine" or '
         "lr_decay_steps=0 (--optimizer.lr_decay_steps on the command line)"),
    ),
    "floor of a constant rate": (
        ["--optimizer.min_lr=1e-4", "--optimizer.lr_schedule=constant"],
        ('optimizer.min_lr=0.0001 does nothing with optimizer.lr_schedule="constant"; use lr_schedule="cosine" or '
         "min_lr=0.0 (--optimizer.min_lr on the command line)"),
    ),
    "number of samples without data": (
        ["--evaluation.num_samples=10"],
        ("evaluation.num_samples=10 needs data.validation or a [[validation_set]], found neither; set "
         "data.validation to the path of held-out tokens, or use evaluation.num_samples=0 (--evaluation.num_samples "
         "on the command line)"),
    ),
    "number of samples with data": (["--evaluation.num_samples=10", "--data.validation=held_out"], None),
    "evaluation without data": (
        ["--evaluation.interval=10"],
        ("evaluation.interval=10 needs data.validation or a [[validation_set]], found neither; set data.validation to "
         "the path of held-out tokens, or use evaluation.interval=0 (--evaluation.interval on the command line)"),
    ),
    "W&B without a project": (
        ["--log.has_wandb=true", "--log.wandb_project="],
        ('log.wandb_project="" must be a name when log.has_wandb=true; use "megatrain" or has_wandb=false '
         "(--log.wandb_project on the command line)"),
    ),
    "project of no W&B": (
        ["--log.wandb_project=llm"],
        ('log.wandb_project="llm" does nothing with log.has_wandb=false; use has_wandb=true or '
         'wandb_project="megatrain" (--log.wandb_project on the command line)'),
    ),
    "project of W&B": (["--log.wandb_project=llm", "--log.has_wandb=true"], None),
    "metrics for every address": (
        ["--diagnostics.metrics_address=0.0.0.0"],
        ('diagnostics.metrics_address="0.0.0.0" can be reached from other machines and needs '
         'diagnostics.metrics_token_file, found ""; name a file with a token, or use metrics_address="127.0.0.1" '
         "(--diagnostics.metrics_address on the command line)"),
    ),
    "metrics by name": (
        ["--diagnostics.metrics_address=node-7"],
        ('diagnostics.metrics_address="node-7" can be reached from other machines and needs '
         'diagnostics.metrics_token_file, found ""; name a file with a token, or use metrics_address="127.0.0.1" '
         "(--diagnostics.metrics_address on the command line)"),
    ),
    "metrics with a token": (["--diagnostics.metrics_address=0.0.0.0", "--diagnostics.metrics_token_file=token"], None),
    "metrics of this machine": (["--diagnostics.metrics_address=::1"], None),
    "one port for two": (
        ["--diagnostics.metrics_port=9000", "--diagnostics.daemon_port=9000"],
        ("diagnostics.metrics_port and diagnostics.daemon_port are both 9000, and one host needs both; use another "
         "metrics_port, or 0 for any free port (--diagnostics.metrics_port on the command line)"),
    ),
    "a port for page and metrics": (
        ["--diagnostics.daemon_metrics_port=8777"],
        ("dashboard.port and diagnostics.daemon_metrics_port are both 8777, and one host needs both; use another "
         "dashboard.port, or 0 for any free port (--diagnostics.daemon_metrics_port on the command line)"),
    ),
    "a page for every address": (
        ["--dashboard.address=0.0.0.0"],
        ('dashboard.address="0.0.0.0" can be reached from other machines, so users must be authenticated: set '
         'dashboard.viewer_token_file or operator_token_file, or trusted_proxies, or use address="127.0.0.1" '
         "(--dashboard.address on the command line)"),
    ),
    "a page with a token": (["--dashboard.address=0.0.0.0", "--dashboard.viewer_token_file=token"], None),
    "actions without an operator": (
        ["--dashboard.enable_actions=true", "--dashboard.viewer_token_file=token"],
        ("dashboard.enable_actions=true lets operators act, but no operator can sign in; set "
         "dashboard.operator_token_file, or role_header with trusted_proxies, or use enable_actions=false "
         "(--dashboard.enable_actions on the command line)"),
    ),
    "profile without steps": (
        ["--profile.ranks=[0]"],
        ("profile.ranks=[0] and profile.num_steps=0 must be set together; use ranks=[0] with num_steps=3, or [] "
         "with 0 for no profile (--profile.ranks on the command line)"),
    ),
    "profile after the end": (
        ["--profile.ranks=[0]", "--profile.first_step=98", "--profile.num_steps=3"],
        ("profile.first_step + profile.num_steps = 98 + 3 = 101 must be at most train.steps=100; use first_step=97 "
         "or less (--profile.first_step on the command line)"),
    ),
    "rank profiled twice": (
        ["--profile.ranks=[1, 0, 1]", "--profile.num_steps=3"],
        "profile.ranks=[1, 0, 1] must not repeat a rank; use [0, 1] (--profile.ranks on the command line)",
    ),
    "fp64 on a GPU": (["--train.precision=fp64", "--runtime.device=cuda"], None),
}  # fmt: skip


def test_rules_between_keys(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, CASES)


# A setting, and the end of the message.
RANGES = [
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
    ("runtime.step_timeout_s=1e+18", "is out of range; use a value > 0 and <= 1000000000"),
    ("profile.ranks=[0, -1, -2]", "is out of range: element 2 is -1; use values >= 0"),
    ('profile.ranks=[0, -1, "a"]', 'must be a list of integers, such as [0, 8]; element 3 is "a", a string'),
    ('job.name="../x"', "is not allowed; use text of the form [A-Za-z0-9][A-Za-z0-9._-]*"),
    ("telemetry.black_box_records=0", "is out of range; use a value >= 256 and <= 16777216"),
    ('data.tokenizer="\udcff"', "holds bytes that are not UTF-8; use text in UTF-8"),
    # sizes that are too large for any run
    (f"train.seed={2**53 + 1}", f"is too large; use a value of at most {2**53}"),
    ("train.steps=99999999999999999999999999", f"is too large; use a value of at most {2**31 - 1}"),
    (f"profile.ranks=[0, {10**20}]", f"is too large: element 2 is {10**20}; use values of at most {2**53}"),
    ("model.hidden_size=1000000000000000", "is out of range; use a value >= 1 and <= 10000000"),
    (f"model.hidden_size={10**20}", "is too large; use a value of at most 10000000"),
    ("model.seq_len=10000000001", "is out of range; use a value >= 1 and <= 10000000000"),
]


def test_value_outside_of_the_range_of_its_key_is_refused(problems_of: ProblemsOf) -> None:
    for setting, rule in RANGES:
        key = setting.partition("=")[0]
        assert problems_of(f"--{setting}") == (f"{setting} {rule} (--{key} on the command line)",)
