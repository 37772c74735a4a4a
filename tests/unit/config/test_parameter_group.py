"""Parameter groups: rules between keys, their precedence, and the names that patterns match."""

from __future__ import annotations

import tomllib
from pathlib import Path

from megatrain.config.changes import training_changes
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.serialize import config_hash, to_toml
from tests.helpers.notification_topics import config_with
from tests.unit.config.conftest import assert_refused

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
