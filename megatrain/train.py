"""`python -m megatrain.train CONFIG`: load the configuration, then build, train and close. `Trainer` uses it too.

The configuration is checked before torch is loaded and before any process group exists. What depends on the device or
on installed kernels is checked later, by the worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.contracts.errors import ConfigError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import Process, process_from_environment
from megatrain.programs.stack_dumps import stacks_on_demand
from megatrain.programs.stop_signals import StopSignals
from megatrain.reporting.sinks import missing_packages
from megatrain.training.extensions import NO_EXTENSIONS, Extensions
from megatrain.training.stopping.watchdog import install_launcher_death_guard, start_watchdog


def train(path: Path, overrides: Sequence[str]) -> ExitCode:
    """Train with the configuration: as the only worker, or as one of several if torchrun's variables are set.

    Raises: MegatrainError. From its exit code a launcher decides whether it restarts the workers.
    """
    launcher_pid = os.getppid()
    process = process_from_environment(os.environ)
    config = load_config(path, overrides, world_size=process.world_size, is_for_training=True).config
    return train_worker(config, process, launcher_pid, ends_process=True)


def train_worker(
    config: Config,
    process: Process,
    launcher_pid: int,
    extensions: Extensions = NO_EXTENSIONS,
    *,
    ends_process: bool,
) -> ExitCode:
    """Run one worker of a run, from the start of the watchdog to the last checkpoint.

    launcher_pid: the parent when the program started. ends_process: this process exits after the run, so it ignores
    stop signals once the state is saved.

    Raises: MegatrainError.
    """
    problems = [*missing_packages(config.log), *extensions.problems(config)]
    if problems:
        raise ConfigError(problems)
    # fork the watchdog before torch is imported, if possible: the child stays small and inherits no held locks
    watch = start_watchdog(config.runtime.save_grace_s, process.rank, config.fence_rule)
    with watch as watchdog, StopSignals() as signals, stacks_on_demand():
        if process.init_method is not None and not process.host:
            # only for torchrun's workers: they must not continue without their launcher, because a new round may have
            # begun; `megatrain launch` kills its own workers
            install_launcher_death_guard(launcher_pid)
        from megatrain.training.worker import run_worker

        exit_code = run_worker(config, process, signals, watchdog, extensions)
        if exit_code is ExitCode.SAVED_AND_STOPPED and ends_process:
            # when the first worker exits, a launcher may signal the others; their state is saved already
            signals.ignore()
        return exit_code


if __name__ == "__main__":
    from megatrain.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
