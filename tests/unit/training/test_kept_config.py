"""What a run records before its first step: its configuration in each round, and the log lines about its batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from megatrain.checkpoint.continuation import TrainingProgress
from megatrain.checkpoint_format.sample_stream import MixtureStage, StreamSource
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.serialize import CONFIG_NAME, config_values, recorded_values, to_toml
from megatrain.contracts.layout import Layout
from megatrain.contracts.sample_ranges import SampleRanges
from megatrain.data.indexed import IndexedDataset
from megatrain.data.mixture import Mixture
from megatrain.data.order import SampleOrder
from megatrain.data.reader import BatchReader
from megatrain.data.training_source import TrainingSource
from megatrain.run_files.config_changes import CHANGES_NAME, ChangedKey, read_changes
from megatrain.run_files.run_directory import RunDirectory
from megatrain.training.batch_notes import batch_notes, length_notes
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


SEQ_LEN = 16
IDLE_8 = "11.1% of the slots are idle: 8 micro-batches for 3 replicas, 2 to 3 each"
IDLE_4 = "33.3% of the slots are idle: 4 micro-batches for 3 replicas, 1 to 2 each"
TO_4, TO_12 = f"from step 3 on, the global batch is 4; {IDLE_4}", "from step 4 on, the global batch is 12"
# (train.steps, completed steps, cursor, skipped) and the notes; steps of 8, 8, 4, 12, 12 samples
NOTES: list[tuple[tuple[int, int, int, SampleRanges], list[str]]] = [
    ((6, 0, 0, ()), [IDLE_8, TO_4, TO_12]),
    ((3, 0, 0, ()), [IDLE_8, TO_4]),
    ((2, 0, 0, ()), [IDLE_8]),
    ((6, 2, 16, ()), [IDLE_4, TO_12]),
    ((6, 3, 20, ()), []),
    # The first stage is within samples that the run skips.
    ((6, 1, 8, ((8, 24),)), []),
]


def test_notes_name_idle_slots_and_the_stages_ahead() -> None:
    for (steps, step, cursor, skipped), expected in NOTES:
        config = Config.from_dict(
            {
                "model": {"vocab_size": 90, "seq_len": SEQ_LEN, "hidden_size": 32, "num_layers": 1, "num_heads": 4},
                "batch": {"global_batch_size": 8},
                "train": {"steps": steps},
                "optimizer": {"lr": 1e-3},
                "data_stage": {"after_tokens": 10 * SEQ_LEN - 3, "global_batch_size": 4},
                "data_stage-2": {"after_tokens": 20 * SEQ_LEN, "global_batch_size": 12},
            }
        )
        found = list(batch_notes(config, Layout(dp_size=3), step, cursor, skipped))
        assert found == expected, (steps, step, cursor)


def test_notes_count_samples_of_sources_that_go_on() -> None:
    mixture = Mixture(7, (MixtureStage(0, (1, 1), 4), MixtureStage(8, (1, 1), 8), MixtureStage(24, (1, 0), 16)), 2)
    dataset = cast(IndexedDataset, None)  # Computing the notes reads no tokens.
    sources = [TrainingSource(StreamSource(name, 1000), dataset, SampleOrder(1000, 4, 7)) for name in ("web", "code")]
    reader = BatchReader.of(sources, mixture)
    # The stages were removed from this configuration, as for samples that the run skips.
    config = Config.from_dict(
        {
            "model": {"vocab_size": 90, "seq_len": 16, "hidden_size": 32, "num_layers": 1, "num_heads": 4},
            "batch": {"global_batch_size": 8},
            "train": {"steps": 9},
            "optimizer": {"lr": 1e-3},
            "data": {"seq_len": 4},
        }
    )
    web, code = mixture.counts(8).tolist()
    # the first epoch has 996 tokens
    first = -(-(996 - 4 * web) // 8) - (-(996 - 4 * code) // 8)
    last = -(-(996 - 4 * web - 8 * (mixture.counts(24)[0] - web)) // 16)
    found = [note.partition(" of them")[0] for note in length_notes(config, reader, TrainingProgress(), ())]
    assert found == [
        f"from step 2 on, samples have 8 tokens: at sample 8, after 32 tokens; {first}",
        f"from step 4 on, samples have 16 tokens: at sample 24, after 160 tokens; {last}",
    ]
