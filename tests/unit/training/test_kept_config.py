"""The run directory keeps the configuration of each round, and its differences from the previous round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.serialize import CONFIG_NAME, config_values, recorded_values, to_toml
from megatrain.run_files.config_changes import CHANGES_NAME, ChangedKey, read_changes
from megatrain.run_files.run_directory import RunDirectory
from megatrain.training.worker import _keep_config
from tests.helpers.source_tree import ROOT


class SilentReporter:
    """A reporter that holds the run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def check_run_lock(self) -> None: ...

    def print_line(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(ROOT / "configs" / "demo.toml").config


def test_changed_keys_of_a_round_are_reported(config: Config, tmp_path: Path) -> None:
    run, reporter = RunDirectory(tmp_path), SilentReporter()
    run.create()
    path = run.diagnosis / CHANGES_NAME
    _keep_config(config, run, reporter, 1, 0)
    _keep_config(config, run, reporter, 2, 40)
    assert read_changes(path) == (), "the first value, and a repetition of it, are not a change"
    warmer = replace(config, optimizer=replace(config.optimizer, lr=config.optimizer.lr * 2))
    _keep_config(warmer, run, reporter, 3, 50)
    (change,) = read_changes(path)
    assert (change.round, change.first_step) == (3, 50)
    assert change.keys == (ChangedKey("optimizer.lr", str(config.optimizer.lr), str(warmer.optimizer.lr)),)
    assert recorded_values(tmp_path) == config_values(warmer)
    assert (tmp_path / CONFIG_NAME).read_text() == to_toml(warmer)
    assert reporter.notes == []


def test_configuration_of_another_version_is_compared_by_keys(config: Config, tmp_path: Path) -> None:
    run, reporter = RunDirectory(tmp_path), SilentReporter()
    run.create()
    (tmp_path / CONFIG_NAME).write_text(to_toml(config) + "\n[of_before]\nanswer = 42\n")
    _keep_config(config, run, reporter, 2, 10)
    (change,) = read_changes(run.diagnosis / CHANGES_NAME)
    assert change.keys == (ChangedKey("of_before.answer", "42", ""),)


def test_training_goes_on_where_no_file_can_be_written(config: Config, tmp_path: Path) -> None:
    run, reporter = RunDirectory(tmp_path), SilentReporter()  # without its directories
    (tmp_path / CONFIG_NAME).write_text("[train]\nsteps = 1\n")
    _keep_config(config, run, reporter, 2, 10)
    assert "training continues" in reporter.notes[0]
