"""Several sources of training data: rules between keys, numbers out of range for other sections, and differences."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megatrain.config.changes import training_changes
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.serialize import to_toml
from megatrain.contracts.errors import ConfigError
from tests.helpers.notification_topics import config_with
from tests.unit.config.conftest import assert_refused

TWO = """
[[data_source]]
path = "web/train"
weight = 0.7
[[data_source]]
path = "code/train"
name = "code"
weight = 0.3
max_epochs = 4
"""
PROBLEMS = {
    '[data]\ntrain = "a"\nbalance = "cost"\nhas_document_mask = true\npacking = "best_fit"\nbad_samples = "replace"': (
        'data.balance="cost" needs the lengths of the documents of every sample'
    ),
    '[data]\ntrain = "a"\nbalance = "cost"': 'data.balance="cost" needs data.has_document_mask=true, or sources with',
    '[data]\ntrain = "a"\ncache_bytes = 2_000_000': (
        r"data.cache_bytes=2000000 must be at least 2 \* data.cache_block_bytes \* \(data.readahead_blocks \+ 1\) = "
        "136314880; use a larger cache, smaller blocks or fewer of them"
    ),
    '[data]\ntrain = "a"\npacking = "best_fit"': 'data.packing="best_fit" needs data.has_document_mask=true, so that',
    '[data]\ntrain = "a"\n[data_source]\npath = "b"': (
        r'data_source.path="b" and data.train="a" both name training data; add a \[\[data_source\]\] for data.train'
    ),
    "[data_source]\nweight = 2.0": "data_source.weight=2.0 does nothing without data_source.path; set path, or remove",
    '[[data_source]]\npath = "a"\n[[data_source]]\npath = "a"\nname = "b"': (
        r'data_source-2.path="a" is also used by \[data_source\]; use one source with the sum of their weights'
    ),
    '[[data_source]]\npath = "a"\n[[data_source]]\npath = "b"\nname = "a"': (
        r'data_source-2.name="a" is also used by \[data_source\]'
    ),
    '[data_source]\npath = "a,b"': r'data_source.path="a,b" is also the name, and a name must not contain a comma',
    '[data_source]\npath = "a"\nweight = 0.0': (
        "data_source.weight=0.0, and no other source has a weight; give one a weight above 0"
    ),
    '[data_source]\npath = "a"\nweight = 1e-10': "data_source.weight=1e-10 is above 0 and below 1e-09; use 0, or",
    '[data_source]\npath = "a"\nweight = 1e-400': "data_source.weight=1e-400 is too close to 0; use a value",
    '[data_source]\npath = "a"\nweight = -1.0': "data_source.weight=-1.0 is out of range",
    '[data_source]\nprefix = "a"': r"data_source.prefix=.a. is not a known key",
    "[data_stage]\nafter_tokens = 5": "data_stage.after_tokens=5 does nothing without data_stage.weights, ",
    '[data]\ntrain = "a"\n[data_stage]\nafter_tokens = 5\nweights = "a=1"': (
        r'data_stage.weights="a=1" needs sources with names, and there is no \[\[data_source\]\]; add them, or remove'
    ),
    TWO + '[data_stage]\nweights = "code=1"': "data_stage.after_tokens=0 is the beginning of the run, for which data_",
    TWO + '[data_stage]\nafter_tokens = 5\nweights = "code=0"': "has no weight above 0; give a source one",
    TWO + '[data_stage]\nafter_tokens = 5\nweights = "cod=1"': 'there is no source "cod"; did you mean "code"?',
    TWO
    + '[data_stage]\nafter_tokens = 5\nweights = "x=1"': 'there is no source "x"; the sources are web/train or code',
    **{
        TWO + f'[data_stage]\nafter_tokens = 5\nweights = "{weights}"': f'"{part}" must be NAME=WEIGHT, each name once'
        for weights, part in {
            "code": "code",
            "code=1, web/train=-1": "web/train=-1",
            "code=1,": "",
            "code=1, code=2": "code=2",
            "code=nan": "code=nan",
            "=1": "=1",
            "code=1e-10": "code=1e-10",
            "code=1e-400": "code=1e-400",
            "code=0.1e-99999999999": "code=0.1e-99999999999",
            "code=1e7": "code=1e7",
        }.items()
    },
    # A stage is not reported for a name that is itself invalid.
    **{
        TWO + f'[[data_source]]\npath = "c"\nname = {name}\n[data_stage]\nafter_tokens = 5\nweights = "{weights}"': (
            f"data_source-3.name={name} {rule}"
        )
        for name, weights, rule in (
            ('"x,y"', "x,y=1", "is not allowed; use text of the form"),
            ('"x,y"', "x=1", "is not allowed; use text of the form"),
            ("7", "7=1", "must be a string"),
        )
    },
    TWO + '[[data_source]]\npath = 7\n[data_stage]\nafter_tokens = 5\nweights = "c=1"': (
        "data_source-3.path=7 must be a string"
    ),
    '[[data_source]]\npath = "a"\nweight = 0.0\n[[data_source]]\npath = 7': "data_source-2.path=7 must be a string",
    TWO
    + '[[data_stage]]\nafter_tokens = 17\nweights = "code=1"\n[[data_stage]]\nafter_tokens = 32\nweights = "code=1"': (
        r"data_stage-2.after_tokens=32 begins in the same sample as \[data_stage\] \(samples have 32 tokens at"
    ),
}


def test_impossible_sources_are_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, PROBLEMS)


def test_sources_survive_a_round_trip_and_differ_by_key(tmp_path: Path) -> None:
    config = config_with(tmp_path, TWO)
    assert {key: source.resolved_name for key, source in config.data_sources.items()} == {
        "data_source.path": "web/train",
        "data_source-2.path": "code",
    }
    assert Config.from_dict(tomllib.loads(to_toml(config))) == config
    other = load_config(tmp_path / "config.toml", ["--data_source-2.weight=0.5"]).config
    assert [change.key for change in training_changes(config, other)] == ["data_source-2.weight"]
    assert list(config_with(tmp_path, '[data]\ntrain = "a"').data_sources) == ["data.train"]
    # the samples of a step are the same
    masked = load_config(tmp_path / "config.toml", ["--data.has_document_mask=true"]).config
    balanced = load_config(tmp_path / "config.toml", ["--data.has_document_mask=true", "--data.balance=cost"]).config
    assert training_changes(masked, balanced) == []
    # costs of a file need no mask
    assert load_config(tmp_path / "config.toml", ["--data.balance=file"]).config.data.balance == "file"


def test_stages_are_in_the_order_of_their_samples(tmp_path: Path) -> None:
    later = '[[data_stage]]\nafter_tokens = 900\nweights = "code=1, web/train=0.0e-400"\n'
    earlier = '[[data_stage]]\nafter_tokens = 97\nweights = " web/train = 2.5e-1,code=.75e0"\n'
    config = config_with(tmp_path, TWO + later + earlier.replace(".75e0", "0.75e0"))
    assert [(placed.first_sample, placed.stage.weight_of) for placed in config.placed_stages] == [
        (4, {"web/train": 0.25, "code": 0.75}),
        (29, {"code": 1.0, "web/train": 0.0}),
    ]
    assert Config.from_dict(tomllib.loads(to_toml(config))) == config
    other = load_config(tmp_path / "config.toml", ["--data_stage-2.after_tokens=98"]).config
    assert [change.key for change in training_changes(config, other)] == ["data_stage-2.after_tokens"]


@pytest.mark.parametrize(("kind", "most"), [("data_source", 1024), ("validation_set", 64)])
def test_each_kind_of_section_has_a_largest_number(tmp_path: Path, kind: str, most: int) -> None:
    def sections(count: int) -> str:
        return "".join(f'[[{kind}]]\npath = "path-{number}"\n' for number in range(count))

    assert len(config_with(tmp_path, sections(most)).sections_of(kind)) == most
    with pytest.raises(ConfigError, match=rf"\[\[{kind}\]\] appears {most + 1} times, and at most {most} are allowed"):
        config_with(tmp_path, sections(most + 1))
