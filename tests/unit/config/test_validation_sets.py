"""Several sets of held-out tokens: rules between keys, names, and differences."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megatrain.config.changes import training_changes
from megatrain.config.config import Config
from megatrain.config.load import load_config, load_tables
from megatrain.config.serialize import to_toml
from megatrain.contracts.errors import ConfigError
from tests.helpers.notification_topics import config_with
from tests.unit.config.conftest import assert_refused

TWO = """
[[validation_set]]
path = "web/validation"
[[validation_set]]
path = "code/validation"
name = "code"
[evaluation]
interval = 10
"""
PROBLEMS = {
    '[data]\nvalidation = "a"\n[validation_set]\npath = "b"': (
        r'validation_set.path="b" and data.validation="a" both name held-out data; add a \[\[validation_set\]\] for '
        r'data.validation, or use data.validation=""'
    ),
    '[validation_set]\nname = "a"': 'validation_set.name="a" does nothing without validation_set.path; set path, or',
    '[[validation_set]]\npath = "a"\n[[validation_set]]\npath = "a"': (
        r'validation_set-2.path="a" is also used by \[validation_set\]; remove one of them, or use another path'
    ),
    '[[validation_set]]\npath = "a"\n[[validation_set]]\npath = "b"\nname = "a"': (
        r'validation_set-2.name="a" is also used by \[validation_set\]; remove one of them, or use another name'
    ),
    '[validation_set]\npath = "a,b"': (
        r'validation_set.path="a,b" is also the name, and a name must not contain a comma .*; set validation_set.name'
    ),
    '[validation_set]\npath = "a"\nname = "b,c"': r'validation_set.name="b,c" is not allowed; use text of the form',
    "[validation_set]\npath = nan\n[evaluation]\ninterval = 1": (
        "validation_set.path=nan must be a string, such as .text., not a float"
    ),
    '[validation_set]\npath = "a"\nweight = 1.0': (
        r"validation_set.weight=1.0 is not a known key; did you mean data_source.weight"
    ),
    '[evaluation]\ninterval = 1\n[validation_set]\npath = ""': (
        r"evaluation.interval=1 needs data.validation or a \[\[validation_set\]\], found neither"
    ),
}


def test_impossible_validation_sets_are_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, PROBLEMS)


def test_an_empty_list_of_sections_is_refused(tmp_path: Path) -> None:
    tables = config_with(tmp_path, TWO).to_dict()
    for kind in ("validation_set", "data_source"):
        with pytest.raises(
            ConfigError, match=rf"{kind}=\[\] has no sections; write one below a line \[\[{kind}\]\], or"
        ):
            load_tables({**tables, kind: []})


def test_sets_survive_a_round_trip_and_differ_by_key(tmp_path: Path) -> None:
    config = config_with(tmp_path, TWO)
    assert {key: one.resolved_name for key, one in config.validation_sets.items()} == {
        "validation_set.path": "web/validation",
        "validation_set-2.path": "code",
    }
    assert Config.from_dict(tomllib.loads(to_toml(config))) == config
    other = load_config(tmp_path / "config.toml", ["--validation_set-2.path=new/validation"]).config
    assert [change.key for change in training_changes(config, other)] == ["validation_set-2.path"]
    assert list(config_with(tmp_path, '[data]\nvalidation = "a"').validation_sets) == ["data.validation"]
    assert config_with(tmp_path, "").validation_sets == {}
