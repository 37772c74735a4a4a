"""Rules between keys of the model, and of parameter groups: each message names keys, values, rule and place."""

from __future__ import annotations

import tomllib
from pathlib import Path

from megatrain.config.changes import training_changes
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.serialize import config_hash, to_toml
from tests.helpers.notification_topics import config_with
from tests.unit.config.conftest import ProblemsOf, assert_refused, assert_rules

# The arguments and the whole message. Its location is that of the first key that the user set.
CASES = {
    "grouped heads": (
        ["--model.num_kv_heads=8"],
        ("model.num_kv_heads=8 must divide model.num_heads=20; use 1, 2, 4, 5, 10 or 20 "
         "(--model.num_kv_heads on the command line)"),
    ),
    "heads and width": (
        ["--model.hidden_size=162"],
        ("model.num_heads=20 must divide model.hidden_size=162; use 1, 2, 3, 6, 9, 18, 27 or 54, "
         "hidden_size 160 or 180, or set model.head_dim (small.toml:6)"),
    ),
    "explicit head width": (["--model.hidden_size=162", "--model.head_dim=8"], None),
    "rotary head width": (
        ["--model.head_dim=7", "--model.positions=rope"],
        ('model.head_dim=7 must be even for model.positions="rope", which rotates pairs of units; use 6 or 8 '
         "(--model.head_dim on the command line)"),
    ),
    "odd head without rotary": (["--model.head_dim=7"], None),
    "rotary scaling without rotary": (
        ["--model.rope_scaling=linear"],
        ('model.rope_scaling="linear" needs model.positions="rope", found "learned"; use positions="rope" or '
         'rope_scaling="none" (--model.rope_scaling on the command line)'),
    ),
    "unused scaling factor": (
        ["--model.positions=rope", "--model.rope_scaling_factor=2"],
        ('model.rope_scaling_factor=2.0 does nothing with model.rope_scaling="none"; use rope_scaling="linear", '
         '"dynamic", "yarn" or "llama3", or rope_scaling_factor=1.0 (--model.rope_scaling_factor on the command line)'),
    ),
    "llama3 factors": (
        [
            "--model.positions=rope", "--model.rope_scaling=llama3", "--model.rope_scaling_factor=8",
            "--model.rope_low_freq_factor=4",
        ],
        ("model.rope_low_freq_factor=4.0 must be less than model.rope_high_freq_factor=4.0; Llama 3.1 has 1.0 and "
         "4.0 (--model.rope_low_freq_factor on the command line)"),
    ),
    "scaling by nothing": (
        ["--model.positions=rope", "--model.rope_scaling=linear"],
        ('model.rope_scaling_factor=1.0 leaves model.rope_scaling="linear" without effect; use a factor above 1 '
         '(Llama 3.1 has 8.0) or rope_scaling="none" (--model.rope_scaling on the command line)'),
    ),
    "llama3 key of linear scaling": (
        [
            "--model.positions=rope", "--model.rope_scaling=linear", "--model.rope_scaling_factor=8",
            "--model.rope_low_freq_factor=2",
        ],
        ('model.rope_low_freq_factor=2.0 does nothing with model.rope_scaling="linear"; use rope_scaling="llama3" '
         "or rope_low_freq_factor=1.0 (--model.rope_low_freq_factor on the command line)"),
    ),
    "llama3 key without scaling": (
        ["--model.positions=rope", "--model.rope_high_freq_factor=8"],
        ('model.rope_high_freq_factor=8.0 does nothing with model.rope_scaling="none"; use rope_scaling="llama3" '
         "or rope_high_freq_factor=4.0 (--model.rope_high_freq_factor on the command line)"),
    ),
    "llama3 length without rotary": (
        ["--model.rope_original_seq_len=32"],
        ('model.rope_original_seq_len=32 does nothing with model.rope_scaling="none"; use rope_scaling="dynamic", '
         '"yarn" or "llama3", or rope_original_seq_len=8192 (--model.rope_original_seq_len on the command line)'),
    ),
    "llama3 with all of its keys": (
        [
            "--model.positions=rope", "--model.rope_theta=500000", "--model.rope_scaling=llama3",
            "--model.rope_scaling_factor=8", "--model.rope_low_freq_factor=2", "--model.rope_high_freq_factor=8",
            "--model.rope_original_seq_len=32",
        ],
        None,
    ),
    "rotary base without rotary": (
        ["--model.rope_theta=500000"],
        ('model.rope_theta=500000.0 does nothing with model.positions="learned"; use positions="rope" or '
         "rope_theta=10000.0 (--model.rope_theta on the command line)"),
    ),
    "window": (
        ["--model.window_size=65"],
        ("model.window_size=65 must be at most model.seq_len=64; use 64 or less, or 0 for no window "
         "(--model.window_size on the command line)"),
    ),
    "window of the whole sequence": (["--model.window_size=64"], None),
    "layers without a window that no layer has": (
        ["--model.full_attention_every=2"],
        ("model.full_attention_every=2 does nothing with model.window_size=0; set window_size, or use "
         "full_attention_every=0 (--model.full_attention_every on the command line)"),
    ),
    "a window in no layer": (
        ["--model.window_size=8", "--model.full_attention_every=1"],
        ("model.full_attention_every=1 with model.num_layers=8: no layer has the window; use a number from 2 to 8, "
         "or window_size=0 (--model.full_attention_every on the command line)"),
    ),
    "a window in all layers": (
        ["--model.window_size=8", "--model.full_attention_every=9"],
        ("model.full_attention_every=9 with model.num_layers=8: no layer is without the window; use a number from "
         "2 to 8, or 0 (--model.full_attention_every on the command line)"),
    ),
    "a window in the only layer": (
        ["--model.window_size=8", "--model.num_layers=1", "--model.full_attention_every=1"],
        ("model.full_attention_every=1 with model.num_layers=1: no layer has the window; use window_size=0 "
         "(--model.full_attention_every on the command line)"),
    ),
    "two norms of a parallel block": (
        ["--model.block=parallel", "--model.branch_norm=both"],
        ('model.branch_norm="both" needs model.block="serial", found "parallel"; use block="serial" or '
         'branch_norm="input" (--model.branch_norm on the command line)'),
    ),
    "a base of layers with a window": (
        ["--model.positions=rope", "--model.rope_local_theta=100"],
        ("model.rope_local_theta=100.0 does nothing with model.window_size=0; set window_size, or use "
         "rope_local_theta=0.0 (--model.rope_local_theta on the command line)"),
    ),
    "a base of one": (
        ["--model.positions=rope", "--model.window_size=8", "--model.rope_local_theta=1"],
        ("model.rope_local_theta=1.0 must be above 1; Gemma 3 has 10000.0; use 0.0 for the same wavelengths in all "
         "layers (--model.rope_local_theta on the command line)"),
    ),
    "an odd part of a head": (
        ["--model.positions=rope", "--model.head_dim=12", "--model.rope_fraction=0.25"],
        ("model.rope_fraction=0.25 of model.head_dim=12 are 3 units; rotary positions rotate pairs of units, so this "
         "number must be even and above 0; use rope_fraction=0.333334 (--model.rope_fraction on the command line)"),
    ),
    "the advised part of a head": (
        ["--model.positions=rope", "--model.head_dim=12", "--model.rope_fraction=0.333334"],
        None,
    ),
    "a part of a head of one unit": (
        ["--model.positions=rope", "--model.head_dim=1", "--model.rope_fraction=0.5"],
        ("model.rope_fraction=0.5 of model.head_dim=1 are 0 units; rotary positions rotate pairs of units, so this "
         "number must be even and above 0; use a head_dim of at least 2 (--model.rope_fraction on the command line)"),
    ),
    "a part without rotary": (
        ["--model.rope_fraction=0.5"],
        ('model.rope_fraction=0.5 does nothing with model.positions="learned"; use positions="rope" or '
         "rope_fraction=1.0 (--model.rope_fraction on the command line)"),
    ),
    "yarn's ramp": (
        [
            "--model.positions=rope", "--model.rope_scaling=yarn", "--model.rope_scaling_factor=8",
            "--model.rope_beta_slow=40",
        ],
        ("model.rope_beta_slow=40.0 must be less than model.rope_beta_fast=32.0; the method was published with 1.0 "
         "and 32.0 (--model.rope_beta_slow on the command line)"),
    ),
    "a base that grows for one pair": (
        [
            "--model.positions=rope", "--model.rope_scaling=dynamic", "--model.rope_scaling_factor=2",
            "--model.head_dim=2",
        ],
        ('model.rope_scaling="dynamic" needs more than one pair of rotated units, found model.head_dim=2 and '
         'model.rope_fraction=1.0; use rope_scaling="linear" (--model.rope_scaling on the command line)'),
    ),
}  # fmt: skip


def test_rules_of_the_model(problems_of: ProblemsOf) -> None:
    assert_rules(problems_of, CASES)


TWO = """
[[parameter_group]]
pattern = "embedding.*"
lr_scale = 0.1
[[parameter_group]]
pattern = "*.mlp.*.weight"
weight_decay = 0.0
"""
PROBLEMS = {
    '[parameter_group]\npattern = "blocks.*.mlp.upp.weight"': (
        r'parameter_group.pattern="blocks.\*.mlp.upp.weight" matches no parameter of this model; one is "blocks.'
    ),
    '[[parameter_group]]\npattern = "*"\n[[parameter_group]]\npattern = "embedding.*"': (
        r'parameter_group-2.pattern="embedding.\*" matches only parameters that earlier groups have'
    ),
    "[parameter_group]\nlr_scale = 0.5": (
        "parameter_group.lr_scale=0.5 does nothing without parameter_group.pattern; set pattern, or remove lr_scale"
    ),
    '[parameter_group]\npattern = "*"\nweight_decay = -0.5': (
        "parameter_group.weight_decay=-0.5 is negative; use 0 or more, or -1 for optimizer.weight_decay"
    ),
    '[parameter_group]\npattern = "*"\nlr_scale = -1.0': "parameter_group.lr_scale=-1.0 is out of range",
    '[parameter_group]\npatern = "*"': r"did you mean parameter_group\.pattern",
}


def test_invalid_groups_are_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, PROBLEMS)


def test_first_matching_group_counts_and_survives_a_round_trip(tmp_path: Path) -> None:
    config: Config = config_with(tmp_path, TWO)
    assert [group.pattern for group in config.parameter_groups] == ["embedding.*", "*.mlp.*.weight"]
    assert config_with(tmp_path, "").parameter_groups == ()
    text = to_toml(config)
    assert text.count("[parameter_group-2]") == 1
    assert Config.from_dict(tomllib.loads(text)) == config

    config_with(tmp_path, TWO)
    other = load_config(tmp_path / "config.toml", ["--parameter_group-2.lr_scale=0.5"]).config
    assert other.parameter_groups[1].lr_scale == 0.5
    assert config_hash(other) != config_hash(config)
    changes = training_changes(config_with(tmp_path, ""), config)
    assert [change.key for change in changes] == [
        "parameter_group.pattern",
        "parameter_group.lr_scale",
        "parameter_group-2.pattern",
        "parameter_group-2.weight_decay",
    ]
