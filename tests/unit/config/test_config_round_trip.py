"""A configuration survives TOML, JSON and dictionaries, and its hash identifies its content."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.options import Option
from megatrain.config.sections import all_options
from megatrain.config.serialize import config_hash, to_toml
from megatrain.contracts.errors import ConfigError, TopologyError
from megatrain.contracts.layout import Layout

VALUES = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    # TOML can contain every character except surrogates.
    "str": st.text(st.characters(exclude_categories=["Cs"])),
    "list of int": st.lists(st.integers(0, 2**31)).map(tuple),
}


def value_of(option: Option) -> st.SearchStrategy:
    return st.sampled_from(option.choices) if option.choices else VALUES[option.kind]


CONFIGS = st.fixed_dictionaries(
    {
        section: st.fixed_dictionaries({name: value_of(option) for name, option in options.items()})
        for section, options in all_options().items()
    }
).map(Config.of_values)


@pytest.mark.slow
@settings(max_examples=50, derandomize=True)
@given(CONFIGS)
def test_toml_and_dictionaries_give_the_same_configuration_back(config: Config) -> None:
    assert Config.from_dict(tomllib.loads(to_toml(config))) == config
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_hash_depends_on_every_key_and_on_nothing_else(small: Path) -> None:
    config = load_config(small).config
    changes = {
        "int": lambda value: value + 1, "float": lambda value: value + 1, "bool": lambda value: not value,
        "str": lambda value: value + "x", "choice": lambda value: value + "x", "list of int": lambda value: (*value, 1),
    }  # fmt: skip
    hashes = {config_hash(config)}
    for section, options in all_options().items():
        for name, option in options.items():
            value = getattr(getattr(config, section), name)
            other = next((choice for choice in option.choices if choice != value), None)
            changed = dataclasses.replace(getattr(config, section), **{name: other or changes[option.kind](value)})
            hashes.add(config_hash(dataclasses.replace(config, **{section: changed})))

    assert len(hashes) == 1 + sum(len(options) for options in all_options().values())
    assert config_hash(Config.from_dict(config.to_dict())) == config_hash(config)


@pytest.mark.slow
def test_hash_is_the_same_in_another_process(small: Path) -> None:
    code = "import sys; from pathlib import Path; from megatrain.config.load import load_config; "
    code += "from megatrain.config.serialize import config_hash; "
    code += "print(config_hash(load_config(Path(sys.argv[1])).config))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(small.resolve())], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == config_hash(load_config(small).config)


def test_dictionary_is_read_strictly() -> None:
    tables = {"model": {"num_head": 2}, "job": {"name": 3}, "optimizer": {"lr": 1}, "train": {"steps": 1}}
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({**tables, "batch": {"global_batch_size": 1}})
    assert caught.value.problems == (
        "model.num_head=2 is not a known key; did you mean model.num_heads?",
        'job.name=3 must be a string, such as "text", not an integer',
        "model.vocab_size is missing and has no default; add vocab_size = N under [model]",
        "model.seq_len is missing and has no default; add seq_len = N under [model]",
        "model.hidden_size is missing and has no default; add hidden_size = N under [model]",
        "model.num_layers is missing and has no default; add num_layers = N under [model]",
    )


def test_configuration_cannot_be_changed(small: Path) -> None:
    config = load_config(small).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.num_heads = 3  # type: ignore[misc]
    assert isinstance(hash(config), int)


def test_values_that_follow_from_others(small: Path) -> None:
    config = load_config(small).config
    assert config.resolved_lr_decay_steps == 100
    assert config.resolved_data_seed == config.train.seed == 1234
    assert config.job.resolved_run_directory == "runs/megatrain"

    config = load_config(
        small, ["--optimizer.lr_decay_steps=50", "--data.seed=3", "--job.run_directory=here", "--job.name=x"]
    ).config
    assert (config.resolved_lr_decay_steps, config.resolved_data_seed) == (50, 3)
    assert config.job.resolved_run_directory == "here"


def test_layout_follows_the_world_size(small: Path) -> None:
    config = load_config(small, ["--parallel.tp_size=2", "--parallel.pp_size=4"]).config

    assert (config.layout(None).world_size, config.layout(24).dp_size) == (8, 3)
    assert config.num_microbatches(Layout(dp_size=3)) == 16
    assert config.num_microbatches(Layout(dp_size=3, cp_size=2, tp_size=2)) == 16, "ranks along cp share samples"
    assert config.num_microbatches(Layout(dp_size=3), global_batch_size=24) == 8
    for world_size in (4, 12):
        with pytest.raises(TopologyError, match=rf"needs 8 ranks, but there are {world_size}; start 8 processes"):
            config.layout(world_size)
