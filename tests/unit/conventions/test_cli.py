"""The command line: commands, overrides, usage errors, and the messages and exit codes of errors."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import megatrain
from megatrain import cli
from megatrain.contracts.errors import ConfigError, DataError
from megatrain.contracts.exit_codes import ExitCode
from tests.helpers.source_tree import ROOT

AddVerb = Callable[[str, str], None]

ECHO = """
SUMMARY = "print the arguments"
ACCEPTS_OVERRIDES = True
def add_arguments(parser):
    parser.add_argument("config")
    parser.add_argument("--dry-run", action="store_true")
def run(args):
    print(args.config, args.dry_run, args.overrides)
    return 0
"""

RAISE = """
from megatrain.contracts.errors import ConfigError, DataError
SUMMARY: str = "raise an error"
def add_arguments(parser):
    parser.add_argument("error")
def run(args):
    raise eval(args.error)
"""


@pytest.fixture
def add_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddVerb:
    """Return a function that installs a verb as another distribution would."""
    verbs = dict(cli.BUILT_IN_VERBS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cli, "find_verbs", lambda: verbs)

    def add(verb: str, source: str) -> None:
        # The name of the test distinguishes the modules of different tests.
        module_name = f"verb_{verb}_{tmp_path.name}"
        (tmp_path / f"{module_name}.py").write_text(source)
        verbs[verb] = module_name

    return add


def test_help_lists_every_verb_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out

    for verb in cli.BUILT_IN_VERBS:
        assert f"\n  {verb} " in out
    assert "report what this machine has" in out
    assert "not usable" not in out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatrain {megatrain.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ("", "subcommands:"),
        ("trian", "unknown subcommand 'trian'; did you mean 'train'?"),
        ("--versoin", "unknown option '--versoin' before the subcommand; did you mean '--version'?"),
        ("echo a.toml --train.steps", "--train.steps needs a value: --train.steps=VALUE"),
        ("echo a.toml --train.steps --dry-run", "--train.steps needs a value: --train.steps=VALUE"),
        ("echo a.toml --dryrun", "unknown argument '--dryrun'; did you mean '--dry-run'?"),
        ("echo a.toml --dry", "unknown argument '--dry'"),
        ("doctor --train.steps=3", "'--train.steps=3': `megatrain doctor` takes no --section.key overrides"),
    ],
)
def test_usage_error_names_the_argument_and_the_rule(
    add_verb: AddVerb, capsys: pytest.CaptureFixture[str], arguments: str, reported: str
) -> None:
    add_verb("echo", ECHO)

    assert cli.main(arguments.split()) == 2
    assert reported in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ("--train.steps -5 a.toml --dry-run --optimizer.lr=1e-4", "True ['--train.steps=-5', '--optimizer.lr=1e-4']"),
        ("a.toml --Model.hidden-size=3", "False ['--Model.hidden-size=3']"),
    ],
    ids=["both spellings, anywhere", "a misspelled one is left to the configuration"],
)
def test_overrides_are_taken(add_verb: AddVerb, capsys: pytest.CaptureFixture[str], arguments: str, taken: str) -> None:
    add_verb("echo", ECHO)

    assert cli.main(["echo", *arguments.split()]) == 0
    assert capsys.readouterr().out == f"a.toml {taken}\n"


@pytest.mark.parametrize(
    ("error", "code", "reported"),
    [
        (
            "ConfigError(['first', 'second'])",
            78,
            "megatrain: error: the configuration has 2 problems:\n1. first\n2. second\n",
        ),
        ("DataError('corpus.txt is empty')", int(DataError.exit_code), "megatrain: error: corpus.txt is empty\n"),
        ("KeyboardInterrupt()", 130, "megatrain: interrupted\n"),
    ],
    ids=["one line a problem", "a type has its own exit code", "the shell's code of an interrupt"],
)
def test_error_is_a_message_and_an_exit_code(
    add_verb: AddVerb, capsys: pytest.CaptureFixture[str], error: str, code: int, reported: str
) -> None:
    add_verb("raise", RAISE)

    assert cli.main(["raise", error]) == code
    assert capsys.readouterr().err == reported


def test_our_own_bug_keeps_its_traceback(add_verb: AddVerb) -> None:
    add_verb("raise", RAISE)
    with pytest.raises(ZeroDivisionError):
        cli.main(["raise", "ZeroDivisionError()"])


def test_broken_verb_breaks_only_itself(add_verb: AddVerb, capsys: pytest.CaptureFixture[str]) -> None:
    add_verb("broken", 'SUMMARY = "break"\nimport no_such_module\n')
    add_verb("nonsense", "def")
    add_verb("echo", ECHO)

    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "break" in out
    assert "nonsense  (not usable: " in out
    assert cli.main(["echo", "a.toml"]) == 0
    assert cli.main(["broken"]) == 1
    assert "'broken' cannot be used here: " in capsys.readouterr().err


def test_verb_of_an_absent_module_is_listed_as_not_usable() -> None:
    assert cli.read_summary("no_such_package.verb").startswith("(not usable: ")
    assert cli.read_summary("megatrain.no_such_verb") == "(not usable: no module megatrain.no_such_verb)"


def test_closed_pipe_ends_quietly() -> None:
    # The reader closes before anything is written: as `megatrain ... | head` does, but earlier.
    command = [sys.executable, "-m", "megatrain", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()

    assert process.returncode == cli.BROKEN_PIPE
    assert errors == b""


@pytest.mark.slow(kept=["--help->/dev/full-74", "config check nowhere.toml->&- 2>&--78"])
@pytest.mark.parametrize(
    ("arguments", "redirections", "code"),
    [
        ("--help", ">/dev/full", ExitCode.SAVE_FAILED),
        ("train --help", ">/dev/full", ExitCode.SAVE_FAILED),
        ("config reference", ">/dev/full", ExitCode.SAVE_FAILED),
        ("logs classify --text pyproject.toml", ">/dev/full", ExitCode.SAVE_FAILED),
        ("logs classify pyproject.toml", ">/dev/full", ExitCode.DATA),
        ("config check nowhere.toml", ">/dev/full 2>/dev/full", ExitCode.CONFIG),
        ("config check nowhere.toml", "2>/dev/full", ExitCode.CONFIG),
        ("config check nowhere.toml", ">&- 2>&-", ExitCode.CONFIG),
        ("config check", "2>/dev/full", ExitCode.USAGE),
        ("logs classify nowhere.jsonl", "2>&-", ExitCode.DATA),
    ],
)
def test_unwritable_output_keeps_the_exit_code_of_an_error(arguments: str, redirections: str, code: ExitCode) -> None:
    command = f'exec "$0" -m megatrain {arguments} {redirections}'
    done = subprocess.run(["sh", "-c", command, sys.executable], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    if code is ExitCode.SAVE_FAILED:
        assert done.stderr == "megatrain: error: standard output cannot be written: No space left on device\n"


@pytest.mark.slow
def test_output_without_a_buffer_that_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "megatrain", "config", "reference"],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == ExitCode.SAVE_FAILED
    assert done.stderr == "megatrain: error: standard output cannot be written: No space left on device\n"


@pytest.mark.slow(kept=["1"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_closed_standard_files_keep_their_numbers(number: int) -> None:
    """Otherwise the next opened file or socket would get the number, and all output would go there."""
    source = "import os; from megatrain.cli import main; main(['--version']); assert os.open('/', 0) > 2"
    command = f'exec "$0" -c "$1" {number}{"<" if number == 0 else ">"}&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, source], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_option_of_another_place_is_not_suggested_to_itself(
    add_verb: AddVerb, capsys: pytest.CaptureFixture[str]
) -> None:
    add_verb(
        "nest",
        """
SUMMARY = "has a verb within"
def add_arguments(parser):
    parser.add_subparsers(required=True).add_parser("inner", allow_abbrev=False).add_argument("--depth")
def run(args):
    return 0
""",
    )
    assert cli.main(["nest", "inner", "--dept", "3"]) == 2
    assert "did you mean '--depth'?" in capsys.readouterr().err
    assert cli.main(["nest", "--depth=3", "inner"]) == 2
    assert "unknown argument '--depth=3'\n" in capsys.readouterr().err


def test_run_and_report_prints_errors_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ConfigError(["only one"])

    assert cli.run_and_report(fail) == 78
    assert "the configuration has 1 problem:\n1. only one" in capsys.readouterr().err


def test_built_in_verbs_have_the_agreed_parts() -> None:
    for verb, name in cli.BUILT_IN_VERBS.items():
        module = cli._load_verb(verb, name)
        assert cli.read_summary(module.__name__) == module.SUMMARY, verb
        module.add_arguments(argparse.ArgumentParser())
        assert callable(module.run), verb
