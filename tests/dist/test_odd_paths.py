"""A run directory whose path has blanks, quotes and non-ASCII letters, reached through a symbolic link."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain import read_run
from megatrain.cli import main
from megatrain.contracts.exit_codes import ExitCode
from tests.helpers.train_process import finish, forked, make_job

STEPS = 4


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    (tmp_path / "run '\xfc' \"x").mkdir()
    link = tmp_path / "a link's \xfc"
    link.symlink_to(tmp_path / "run '\xfc' \"x", target_is_directory=True)
    return link


@pytest.mark.slow
def test_a_run_below_odd_names_and_a_link(odd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = odd / "the 'text' \xfc.jsonl"
    text.write_text('{"text": "some words, again and again, as many as a job of a few steps asks for"}\n' * 100)
    tokens = odd / "tokens '\xfc'"
    build = ["data", "build", "--input", str(text), "--output", str(tokens), "--tokenizer", "bytes", "--workers", "1"]
    assert main(build) == ExitCode.OK
    assert main(["data", "verify", str(tokens)]) == ExitCode.OK
    (prefix,) = [path.with_suffix("") for path in tokens.glob("train*.bin")]
    job = make_job(
        odd / "a job",
        {"data": {"train": str(prefix)}, "train": {"steps": STEPS}, "model": {"num_layers": 1, "vocab_size": 320}},
        {"checkpoint": {"interval": 2, "save_at_end": True, "arena_directory": str(odd)}},
    )
    config, run = str(job.config_file), str(job.files.root)
    assert main(["config", "check", config]) == ExitCode.OK
    with forked(["megatrain.train", config]) as process:
        code, said, errors = finish(process)
    assert code == ExitCode.OK, said + errors
    assert read_run(run).metrics("step").num_rows == STEPS
    capsys.readouterr()
    assert main(["ckpt", "ls", run]) == ExitCode.OK
    assert str(STEPS) in capsys.readouterr().out
    assert main(["ckpt", "verify", run]) == ExitCode.OK
