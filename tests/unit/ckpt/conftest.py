"""Shared fixtures of the tests of `megatrain ckpt`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatrain.checkpoint_format.local_location import LocalLocation
from tests.helpers.checkpoint_tree import go_back, put_branch, put_resume
from tests.helpers.saved_checkpoint import Ckpt, ckpt_runner, put_whole


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str]) -> Ckpt:
    return ckpt_runner(capsys)


@pytest.fixture(scope="session")
def run_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that tests copy: writing its checkpoints takes much longer than a copy."""
    run = tmp_path_factory.mktemp("template") / "run"
    checkpoints = LocalLocation(run / "checkpoints")
    put_resume(checkpoints, "main")
    main = put_branch(checkpoints, "main")
    for step in (10, 20, 30, 40):
        put_whole(main, step)
    go_back(checkpoints, 20, "a spike")
    put_whole(checkpoints / "branch-0002", 25)
    return run


@pytest.fixture
def run(run_template: Path, tmp_path: Path) -> Path:
    """A run with steps 10 to 40 on main that went back to step 20 and has saved step 25 since."""
    return Path(shutil.copytree(run_template, tmp_path / "run"))
