"""The command line of `megatrain launch`: torchrun's names, refused flags, templates on stdout, errors on stderr."""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.commands.argument_types import spellings
from megatrain.contracts.errors import ConfigError
from megatrain_job.commands.etcd_flags import PASSWORD_VARIABLE, EtcdFlags
from megatrain_launcher.launch.flags import LaunchFlags, add_launch_arguments, launch_flags
from megatrain_launcher.launch.torchrun_flags import REFUSED
from tests.helpers.etcd_server import etcd_program
from tests.helpers.launch_cases import write_config


def parse(*arguments: str, overrides: tuple[str, ...] = ()) -> LaunchFlags:
    parser = argparse.ArgumentParser(prog="megatrain launch", allow_abbrev=False)
    add_launch_arguments(parser)
    args = parser.parse_args([*arguments, "run.toml"])
    args.overrides = list(overrides)
    return launch_flags(args)


def problems_of(*arguments: str, overrides: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return why a command line is refused; empty if it is accepted."""
    try:
        parse(*arguments, overrides=overrides)
    except ConfigError as error:
        return error.problems
    return ()


def test_torchruns_names_in_both_spellings() -> None:
    hyphens = ["--nnodes=2:4", "--nproc-per-node=8", "--rdzv-endpoint=e1:1,e2:2", "--rdzv-id=big", "--log-dir=l",
             "--local-addr=10.0.0.1", "--kernel-log=k",
             "--rdzv-conf=user=u,password_file=p,cacert=a,cert=c,key=k"]  # fmt: skip
    underscores = [f"{name.replace('-', '_').replace('__', '--', 1)}={value}" for name, value in
                   (word.split("=", 1) for word in hyphens)]  # fmt: skip
    more = ["-t", "3", "-m", "own.module", "--label", "switch=s1,rack=r2"]

    flags = parse(*hyphens, *more)

    assert parse(*underscores, *more) == flags
    assert (flags.min_hosts, flags.max_hosts, flags.workers) == (2, 4, "8")
    assert flags.etcd == EtcdFlags("e1:1,e2:2", "u", "p", "a", "c", "k")
    assert flags.overrides == ("--job.name=big",)
    assert (flags.log_dir, flags.local_addr, flags.tee, flags.module) == ("l", "10.0.0.1", "all", "own.module")
    assert (flags.kernel_log, flags.labels) == ("k", {"switch": "s1", "rack": "r2"})


def test_nnodes_is_minimum_and_maximum_of_hosts() -> None:
    assert parse() == LaunchFlags(config=Path("run.toml"))
    flags = parse("--nnodes=3", "--spares=1", "--standalone")
    assert (flags.min_hosts, flags.max_hosts, flags.spares, flags.is_standalone) == (3, 3, 1, True)


def test_torchruns_other_flags_name_their_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    for option in REFUSED:
        for spelling in spellings(option):
            with pytest.raises(SystemExit) as caught:
                parse(spelling)
            assert caught.value.code == 2, spelling
            text = capsys.readouterr().err
            assert f"torchrun's {spelling} is not used here: {REFUSED[option]}" in text
    # also with a value
    for arguments in (["--max-restarts", "3"], ["--max_restarts=3"], ["-r", "3"]):
        with pytest.raises(SystemExit):
            parse(*arguments)
    assert capsys.readouterr().err.count("is not used here") == 3


def test_wrong_values_are_named() -> None:
    for arguments, expected in [
        (["--nnodes=0"], "--nnodes=0: expected a number of hosts, or MIN:MAX"),
        (["--nnodes=4:2"], "--nnodes=4:2: expected"),
        (["--nnodes=two"], "--nnodes=two: expected"),
        (["--spares=-1"], "--spares=-1: expected a number of hosts"),
        (["--tee=0:3"], "--tee=0:3: expected none, first"),
        (["--host-id=a/b"], "--host-id='a/b': expected letters"),
        (["--label", "switch"], "--label switch: expected NAME=VALUE"),
        (["--label=switch=a", "--label=switch=b"], "--label switch has two values, a and b; give one of them"),
        (["--node=a"], "--node is only for --write-template jobset"),
        (["--write-template=jobset", "--node=a b"], "--node='a b': expected the name of a node"),
        (["--write-template=jobset", "--node=a", "--node=a"], "--node=a is given twice"),
        (["--standalone", "--rdzv-endpoint=e:1"], "--standalone starts its own etcd"),
        (["--rdzv-backend=c10d"], "--rdzv-backend=c10d: hosts find each other through etcd"),
        (["--rdzv-conf=ttl=5"], "--rdzv-conf ttl: set recovery.lease_ttl_s"),
        (["--rdzv-conf=password=x"], "other users of the machine would see it; use password_file=FILE"),
        (["--rdzv-conf=color=red"], "--rdzv-conf color is not known; use user, password_file"),
        (["--rdzv-conf=user"], "--rdzv-conf user has no value"),
        (["--rdzv-conf=user=a", "--etcd-user=b"], "--rdzv-conf user=a and --etcd-user=b differ"),
    ]:
        found = problems_of(*arguments)
        assert len(found) == 1, (arguments, found)
        assert expected in found[0], arguments

    # All errors are reported at once.
    assert len(problems_of("--nnodes=x", "--tee=x", "--rdzv-conf=a=b,c=d")) == 4
    (problem,) = problems_of("--rdzv-id=a", overrides=("--job.name=b",))
    assert problem == "--rdzv-id=a and --job.name=b name two jobs; give one of them"


def test_a_password_comes_from_the_environment_or_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from file\n")
    flags = EtcdFlags("https://e:1", "u", str(tmp_path / "password"))

    settings = flags.settings({PASSWORD_VARIABLE: "from environment"})
    assert settings.credentials is not None
    assert settings.credentials.password == "from file"

    settings = EtcdFlags("https://e:1", "u").settings({PASSWORD_VARIABLE: "from environment"})
    assert settings.credentials is not None
    assert settings.credentials.password == "from environment"
    assert EtcdFlags("e:1").settings({}).credentials is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (EtcdFlags("e:1", "u"), f"--etcd-user=u without a password: set {PASSWORD_VARIABLE}"),
        (EtcdFlags("e:1", "", "/p"), "without a user: add --etcd-user"),
        (EtcdFlags("e:1", "u", "/no/such/file"), "/no/such/file cannot be read: No such file"),
        (EtcdFlags("e:1", certificate="/c"), "a client certificate and its key go together"),
        (EtcdFlags("e:1", ca="/no/such/file"), "cannot use /no/such/file as authority"),
        (EtcdFlags("e:x"), "etcd endpoint 'e:x'"),
    ],
)
def test_unreachable_etcd_is_named(flags: EtcdFlags, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace(":", ".")):
        flags.settings({})


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
        (["--nnodes=2"], 78, "--nnodes=2:2 without --rdzv-endpoint: hosts find each other through etcd"),
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
    assert line.endswith(
        "set job.run_directory to a directory on a file system with locks, or name an etcd (--rdzv-endpoint)"
    )


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
