"""The `megatrain` command: finds a subcommand, parses its arguments, turns errors into messages and exit codes.

A subcommand is a module with `SUMMARY: str` (a literal), `add_arguments(parser)` and `run(args) -> int`. With
`ACCEPTS_OVERRIDES = True` it takes configuration overrides: `args.overrides` holds every `--section.key=value`. Other
distributions add subcommands through the entry-point group `megatrain.commands`.

Only the subcommand that runs is imported. The help text reads each SUMMARY from the module's source, so
`megatrain --help` loads no torch, and a subcommand that cannot be imported does not break the others.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

import megatrain
from megatrain.contracts.errors import ConfigError, FlagError, MegatrainError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.formatting import count_text, printable
from megatrain.programs.standard_streams import open_standard_streams, settle

ENTRY_POINT_GROUP = "megatrain.commands"

# The subcommands of this distribution. A source tree without installed metadata has no entry points.
BUILT_IN_VERBS: Mapping[str, str] = {
    **{
        verb: f"megatrain.commands.{verb}"
        for verb in ("blackbox", "ckpt", "config", "data", "doctor", "sample", "train")
    },
    "annotate": "megatrain_job.commands.annotate",
    "logs": "megatrain_diagnostics.commands.logs",
}

_TWO_WORDS: Mapping[str, str] = {"logs classify": "megatrain_diagnostics.commands.logs_classify"}
"""Subcommands of two words. Their first word is also a subcommand."""

# A shell reports 128 + the signal's number for a program that a signal ended: SIGINT is 2, SIGPIPE is 13.
INTERRUPTED = 130
BROKEN_PIPE = 141

# Matches any section and key: `load_config` reports misspelled ones together with all other mistakes.
_OVERRIDE = re.compile(r"--\w[\w-]*\.[^=\s]+(=.*)?", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    try:
        return run_and_report(lambda: _dispatch(arguments))
    except SystemExit as stop:  # raised by argparse after --help or a usage error; it ignores write errors
        settle(sys.stderr)
        error = settle(sys.stdout)
        if error is not None:
            return _report_lost_output(error)
        return stop.code if isinstance(stop.code, int) else int(ExitCode.FAILURE)


def run_and_report(action: Callable[[], int]) -> int:
    """Call `action` and return its exit code. Errors that the user can correct are printed on stderr."""
    try:
        code = action()
        sys.stdout.flush()
        return code
    except MegatrainError as error:
        _print_error(f"error: {printable(_message(error))}")
        settle(sys.stdout)
        return int(error.exit_code)
    except KeyboardInterrupt:
        _print_error("interrupted")
        settle(sys.stdout)
        return INTERRUPTED
    except BrokenPipeError as error:
        settle(sys.stdout, error)  # the reader has closed the pipe (`megatrain ... | head`)
        return BROKEN_PIPE
    except OSError as error:
        if settle(sys.stdout) is not error:
            raise
        return _report_lost_output(error)


def _report_lost_output(error: OSError) -> int:
    _print_error(f"error: standard output cannot be written: {error.strerror}")
    return int(ExitCode.SAVE_FAILED)


def _print_error(text: str) -> None:
    """Print a message on stderr. If it cannot be written, the exit code stays the same."""
    with suppress(OSError):
        print(f"megatrain: {text}", file=sys.stderr, flush=True)
    settle(sys.stderr)


@functools.cache
def find_verbs() -> Mapping[str, str]:
    """Return the module of each installed subcommand, by name. Other distributions cannot replace megatrain's.

    Reads the metadata of all installed packages, once in each process.
    """
    verbs = dict(BUILT_IN_VERBS)
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        verbs.setdefault(entry_point.name, entry_point.value)
    return dict(sorted(verbs.items()))


def read_summary(module_name: str) -> str:
    """Return a subcommand's SUMMARY without importing its module."""
    try:
        spec = importlib.util.find_spec(module_name)
    except ImportError as error:
        return f"(not usable: {error})"
    if spec is None or spec.origin is None:
        return f"(not usable: no module {module_name})"
    try:
        with open(spec.origin, encoding="utf-8") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return f"(not usable: {spec.origin}: {error})"
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id="SUMMARY")], value=ast.Constant(value=str(summary)))
                | ast.AnnAssign(target=ast.Name(id="SUMMARY"), value=ast.Constant(value=str(summary)))
            ):
                return summary
    return "(no summary)"


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_help_text(), file=sys.stderr)
        return int(ExitCode.USAGE)
    first, *rest = arguments
    if first in ("-h", "--help"):
        print(_help_text())
        return int(ExitCode.OK)
    if first == "--version":
        print(f"megatrain {megatrain.__version__}")
        return int(ExitCode.OK)
    if first.startswith("-"):
        _usage_error(f"unknown option {first!r} before the subcommand{_suggest(first, ['--help', '--version'])}")
    both = " ".join(arguments[:2])
    if both in _TWO_WORDS:
        return _run_verb(both, _load_verb(both, _TWO_WORDS[both]), arguments[2:])
    module_name = BUILT_IN_VERBS.get(first) or find_verbs().get(first)
    if module_name is None:
        known = list(find_verbs())
        _usage_error(f"unknown subcommand {first!r}{_suggest(first, known)} (known: {', '.join(known)})")
    return _run_verb(first, _load_verb(first, module_name), rest)


def _load_verb(verb: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a module of another distribution may fail in any way
        raise MegatrainError(
            f"{verb!r} cannot be used here: importing {module_name} failed with {type(error).__name__}: {error}\n"
            f"`megatrain doctor` lists what is missing; `python -c 'import {module_name}'` shows where it failed"
        ) from error


def _run_verb(verb: str, module: ModuleType, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"megatrain {verb}", description=module.SUMMARY, allow_abbrev=False)
    module.add_arguments(parser)
    accepts_overrides = getattr(module, "ACCEPTS_OVERRIDES", False)
    if accepts_overrides:
        arguments, overrides = _take_overrides(parser, arguments)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        if not accepts_overrides and _OVERRIDE.fullmatch(unknown[0]):
            parser.error(f"unknown argument {unknown[0]!r}: `megatrain {verb}` takes no --section.key overrides")
        name = unknown[0].partition("=")[0]
        parser.error(f"unknown argument {unknown[0]!r}{_suggest(name, _option_names(parser))}")
    if accepts_overrides:
        args.overrides = overrides
    code: int = module.run(args)
    return code


def _take_overrides(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into arguments for argparse and overrides, each written --section.key=value."""
    kept: list[str] = []
    overrides: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        if word == "--":
            kept += [word, *remaining]
        elif not _OVERRIDE.fullmatch(word):
            kept.append(word)
        elif "=" in word:
            overrides.append(word)
        else:
            value = next(remaining, None)
            if value is None or value.startswith("--"):
                parser.error(f"{word} needs a value: {word}=VALUE")
            overrides.append(f"{word}={value}")
    return kept, overrides


def _option_names(parser: argparse.ArgumentParser) -> list[str]:
    names: list[str] = []
    for action in parser._actions:
        names += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for choice, subparser in action.choices.items():
                names += [choice, *_option_names(subparser)]
    return names


def _suggest(word: str, known: Iterable[str]) -> str:
    # `word` itself can be known: as an option of another subcommand
    matches = difflib.get_close_matches(word, [name for name in known if name != word], n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _usage_error(message: str) -> NoReturn:
    print(f"usage: megatrain SUBCOMMAND ...\nmegatrain: error: {message}", file=sys.stderr)
    raise SystemExit(int(ExitCode.USAGE))


def _help_text() -> str:
    verbs = find_verbs()
    width = max(map(len, verbs))
    lines = [f"  {verb:<{width}}  {read_summary(module_name)}" for verb, module_name in verbs.items()]
    return "\n".join(
        [
            "usage: megatrain [--help] [--version] SUBCOMMAND ...",
            "",
            "Pretraining of large language models with tensor, pipeline and data parallelism.",
            "",
            "subcommands:",
            *lines,
            "",
            "`megatrain SUBCOMMAND --help` shows the options of a subcommand.",
        ]
    )


def _message(error: MegatrainError) -> str:
    if not isinstance(error, ConfigError):
        return str(error)
    count = len(error.problems)
    what = "command line" if isinstance(error, FlagError) else "configuration"
    return f"the {what} has {count_text(count, 'problem')}:\n{error}"
