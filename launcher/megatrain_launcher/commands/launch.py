"""`megatrain launch CONFIG`: train on this host, or on all hosts that run the same command, and recover from failures.

With --from-hf, a separate process imports the model, because the launcher loads no torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from megatrain.commands.printing import print_note
from megatrain.config.load import load_config
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.programs.stop_signals import StopSignals, record_only
from megatrain_launcher.launch.flags import DEFAULT_MODULE, LaunchFlags, add_launch_arguments, launch_flags
from megatrain_launcher.logs.program_log import log_to_stderr

if TYPE_CHECKING:
    from megatrain_launcher.executor.settings import ExecutorSettings

_PROGRAM = "megatrain.commands.start_from_hf"

SUMMARY = "train on one host or many: checks hosts, restarts after failures, uses spares; accepts torchrun's flags"
ACCEPTS_OVERRIDES = True


def with_imported_model(flags: LaunchFlags) -> LaunchFlags:
    """Import the model that `flags` name, unless the run directory has it, and return `flags` with its settings.

    Raises: CheckpointError with the program's message.
    """
    if not flags.from_hf:
        return flags
    command = [sys.executable, "-m", _PROGRAM, str(flags.config), flags.from_hf, *flags.overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckpointError(f"--from-hf {flags.from_hf}: {done.stderr.strip().removeprefix('megatrain: error: ')}")
    return replace(flags, overrides=(*done.stdout.splitlines(), *flags.overrides), from_hf="")


class StoppedEarly(BaseException):
    """A signal asked to stop while the launch was being prepared. Like KeyboardInterrupt it is not an error."""


def stop_early(name: str) -> None:
    """Raise an exception, so that the steps already taken are undone in order: StoppedEarly, or KeyboardInterrupt for
    SIGINT.
    """
    if name == signal.SIGINT.name:
        raise KeyboardInterrupt
    raise StoppedEarly(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_launch_arguments(parser)


def run(args: argparse.Namespace) -> int:
    flags = launch_flags(args)
    if flags.template:
        print(_template(flags), end="")
        return 0
    from megatrain_launcher.launch.host import run_launch
    from megatrain_launcher.launch.plan import make_plan

    log_to_stderr()
    _check_directory()
    environment = dict(os.environ)

    def execute(settings: ExecutorSettings) -> int:
        # imported only here: the program that starts several executors needs neither module
        from megatrain_launcher.executor.executor import run_executor
        from megatrain_launcher.launch.cordons import parts_with

        if early.is_requested:  # the exception was raised before, during an import that suppressed it
            stop_early(early.name)
        code = run_executor(settings, parts_with(plan.platform))
        early.set_callbacks(record_only)
        return code

    try:
        with StopSignals(stop_early) as early:
            plan = make_plan(with_imported_model(flags), environment)
            return run_launch(
                plan, environment, execute, print_note, on_job_over=lambda: early.set_callbacks(record_only)
            )
    except StoppedEarly as stop:
        with suppress(OSError):  # the reader is gone
            print_note(f"{stop}: stopped before training began")
        return ExitCode.SAVED_AND_STOPPED


def _check_directory() -> None:
    """Raise ConfigError if the current directory has been removed, because relative paths do not work there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(["the current directory has been removed; change to one that exists"]) from None


def _template(flags: LaunchFlags) -> str:
    from megatrain_launcher.launch.plan import count_hosts
    from megatrain_launcher.launch.templates import write_template

    loaded = load_config(flags.config, flags.overrides, is_for_training=flags.module == DEFAULT_MODULE)
    largest = flags.max_hosts or 1
    if flags.workers.isdigit():  # the cluster hosts' devices are not known here
        count_hosts(loaded.config, loaded.origins, flags.min_hosts or largest, largest, int(flags.workers))
    return write_template(flags, loaded.config, largest)
