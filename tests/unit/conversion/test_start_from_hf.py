"""A job that starts from a Hugging Face directory: which keys are set, what is imported once, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.config.load import load_config
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.contracts.files.file_locks import is_locked
from megatrain.conversion import start_from_hf
from megatrain.conversion.hugging_face import import_hf
from megatrain.conversion.start_from_hf import IMPORTED_NAME, settings_from_hf
from megatrain.data.tokenizer import train_tokenizer
from megatrain_launcher.commands.launch import with_imported_model
from megatrain_launcher.launch.flags import LaunchFlags
from tests.helpers.hf_models import export, random_parameters, tiny
from tests.helpers.require import require_module

require_module("safetensors")


def job_file(directory: Path, more: str = "") -> Path:
    path = directory / "job.toml"
    path.write_text(
        f'[job]\nname = "tuned"\nrun_directory = "{directory}/run"\n[batch]\nglobal_batch_size = 4\n'
        f"[train]\nsteps = 2\n[optimizer]\nlr = 1e-4\n{more}"
    )
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = tiny("gemma2")
    return export(random_parameters(model), model, tmp_path / "hf")


def test_configured_keys_override_the_model_of_the_files(tmp_path: Path, source: Path) -> None:
    path = job_file(tmp_path, "[model]\nseq_len = 16\ndropout = 0.1\n")
    settings = settings_from_hf(path, ["--train.steps=3"], source)
    config = load_config(path, [*settings, "--train.steps=3"]).config

    assert config.model.seq_len == 16
    assert config.model.dropout == 0.1
    assert config.model.attention_softcap == 1.5
    assert config.model.norm == "rmsnorm_zero_centered"
    assert Path(config.checkpoint.load) == tmp_path / "run" / IMPORTED_NAME
    assert read_manifest(LocalLocation(Path(config.checkpoint.load))).step == 0


def test_configured_tokenizer_overrides_the_one_of_the_files(tmp_path: Path, source: Path) -> None:
    train_tokenizer(["to be or not to be"], 257).save(source / "tokenizer.json")
    for more, tokenizer in (("", source / "tokenizer.json"), ('[data]\ntokenizer = "/own/tokenizer.json"\n', None)):
        path = job_file(tmp_path, more)
        settings = settings_from_hf(path, [], source)
        assert load_config(path, settings).config.data.tokenizer == str(tokenizer or "/own/tokenizer.json")


def test_the_weights_are_imported_once(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, are_others_locked_out = job_file(tmp_path), list[bool | None]()

    def importing(found: Path, location: LocalLocation) -> None:
        with (tmp_path / "run" / f"{IMPORTED_NAME}.lock").open() as lock:
            are_others_locked_out.append(is_locked(lock.fileno()))
        import_hf(found, location)

    monkeypatch.setattr(start_from_hf, "import_hf", importing)
    first = settings_from_hf(path, [], source)
    times = {one: one.stat().st_mtime_ns for one in (tmp_path / "run" / IMPORTED_NAME).iterdir()}

    assert settings_from_hf(path, [], source, can_import=False) == first
    assert {one: one.stat().st_mtime_ns for one in (tmp_path / "run" / IMPORTED_NAME).iterdir()} == times
    assert are_others_locked_out == [True]


def test_start_from_hf_with_conflicts_is_refused(tmp_path: Path, source: Path) -> None:
    path = job_file(tmp_path)
    with pytest.raises(ConfigError, match="several workers would import the model at once; use `megatrain launch`"):
        settings_from_hf(path, [], source, can_import=False)
    with pytest.raises(ConfigError, match=r'checkpoint\.load="x" and --from-hf .* each name a model to start from'):
        settings_from_hf(path, ["--checkpoint.load=x"], source)
    assert not (tmp_path / "run").exists()

    settings_from_hf(path, [], source)
    other = tiny("gemma2", ffn_size=64)
    with pytest.raises(
        CheckpointError, match=r"holds another model than .* \(ffn_size\); name another job.run_directory"
    ):
        settings_from_hf(path, [], export(random_parameters(other), other, tmp_path / "other"))


@pytest.mark.slow
def test_the_launcher_gets_the_settings_from_a_program(tmp_path: Path, source: Path) -> None:
    flags = LaunchFlags(job_file(tmp_path), ("--train.steps=3",), from_hf=str(source))
    assert with_imported_model(flags).overrides == (*settings_from_hf(flags.config, [], source), "--train.steps=3")

    with pytest.raises(CheckpointError, match=r"--from-hf /nowhere: /nowhere/config\.json: No such file"):
        with_imported_model(LaunchFlags(flags.config, from_hf="/nowhere"))
