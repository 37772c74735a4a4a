"""`megatrain launch` on the command line: templates on stdout, errors on stderr, and no torch before it is needed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.cli import main
from tests.helpers.etcd_server import etcd_program
from tests.helpers.launch_cases import write_config


def test_a_template_is_printed_and_nothing_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    assert main(["launch", "--write-template", "slurm", "--nnodes=2", str(config), "--train.steps=7"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n")
    assert f"megatrain launch --nnodes=2:2 --nproc-per-node=1 {config} " in text
    assert " --train.steps=7 &" in text
    assert not (tmp_path / "run").exists()


def test_mistakes_end_it_before_anything_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, expected in [
        (
            ["--nnodes=5", "--parallel.pp_size=2"],
            78,
            "parallel.pp_size * tp_size = 2 * 1 = 2 must divide the world size of 5",
        ),
        (["--train.stepz=3"], 78, "train.stepz"),
        (["--nnodes=2"], 78, "--nnodes=2:2 without --rdzv-endpoint"),
        (["--max-restarts=3"], 2, "torchrun's --max-restarts is not used here: the driver restarts"),
        (["--rdzv_endpont=x"], 2, "did you mean '--rdzv_endpoint'?"),
    ]:
        assert main(["launch", "--platform=local", *arguments, str(write_config(tmp_path))]) == code, arguments
        assert expected in capsys.readouterr().err, arguments
        assert not (tmp_path / "run").exists(), arguments


def test_a_directory_that_is_gone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["launch", str(config)]) == 78
    assert "the current directory has been removed" in capsys.readouterr().err


def test_file_system_without_locks_ends_a_launch_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    etcd_program()
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert main(["launch", "--platform=local", str(write_config(tmp_path))]) == 78
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "lock" in line]
    assert "/lock cannot be locked (Operation not supported): the file system has no file locks, and the job's" in line
    assert line.endswith("set job.run_directory to one that has, or launch with --rdzv-endpoint of an etcd elsewhere")


def test_launch_driver_and_executor_load_no_torch() -> None:
    source = (
        "import sys\n"
        "import megatrain_launcher.commands.launch, megatrain_launcher.commands.driver\n"
        "import megatrain_launcher.launch.host, megatrain_launcher.launch.dedicated_driver\n"
        "import megatrain_launcher.executor.executor, megatrain_launcher.launch.cordons\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
