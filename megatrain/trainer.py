"""`megatrain.Trainer`: a training run from a Python program, in one process or as one worker of a launcher.

Numbers, checkpoints and files are those of `megatrain train`. torch is loaded when `run` is called.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NoReturn, TypeAlias

from megatrain.config.config import Config
from megatrain.config.load import load_config, load_tables
from megatrain.contracts.errors import UsageError
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import Process, process_from_environment
from megatrain.train import train_worker
from megatrain.training.extensions import Callback, Extensions, Loss
from megatrain.worker_program import run_worker_program

ConfigSource: TypeAlias = "str | os.PathLike[str] | Config | Mapping[str, object]"
"""The path of a TOML file, a configuration, or its sections and keys as nested dictionaries."""


class Trainer:
    """One worker of a run: the only one, or one of several if torchrun's environment variables are set.

    Under `megatrain launch` every worker must make its Trainer from the configuration that was given to the launch.
    """

    def __init__(
        self,
        config: ConfigSource,
        overrides: Sequence[str] = (),
        *,
        callbacks: Sequence[Callback] = (),
        loss: Loss | None = None,
    ) -> None:
        """Store the arguments; the configuration is read when `config` is first used.

        overrides: settings as on the command line, "--train.steps=10". callbacks: called on every rank. loss: replaces
        cross entropy in training, but not in evaluations; see extensions.Loss.
        """
        self._source = config
        self._overrides = tuple(overrides)
        self._extensions = Extensions(tuple(callbacks), loss)
        self._launcher_pid = os.getppid()

    @cached_property
    def config(self) -> Config:
        """The checked configuration. Raises: ConfigError with all problems; TopologyError for bad rank variables."""
        world_size = self._process.world_size
        if isinstance(self._source, Config | Mapping):
            tables = self._source.to_dict() if isinstance(self._source, Config) else self._source
            loaded = load_tables(tables, self._overrides, world_size=world_size, is_for_training=True)
        else:
            loaded = load_config(Path(self._source), self._overrides, world_size=world_size, is_for_training=True)
        return loaded.config

    @property
    def run_directory(self) -> Path:
        """The directory of the run's metrics and logs; of its checkpoints too, unless checkpoint.directory is set."""
        return Path(self.config.job.resolved_run_directory)

    def run(self) -> ExitCode:
        """Train to the last step, or until a stop signal: then save the state and return SAVED_AND_STOPPED.

        An existing run continues from its newest checkpoint. While this method runs, the stop signals (SIGINT too)
        are requests to save and stop. A child process, the watchdog, kills this process if the current step does not
        end within runtime.save_grace_s after such a request; a slow step gets twice its usual time.
        Raises: MegatrainError; UsageError outside the main thread.
        """
        return self._train(ends_process=self._process.init_method is not None)

    def run_as_program(self) -> NoReturn:
        """Call `run`, report errors as `megatrain train` does, and exit the process.

        For the workers of a launcher, which decides from the exit code whether it restarts the workers.
        """
        sys.exit(run_worker_program(lambda: self._train(ends_process=True)))

    @cached_property
    def _process(self) -> Process:
        return process_from_environment(os.environ)

    def _train(self, *, ends_process: bool) -> ExitCode:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"Trainer.run in the thread {threading.current_thread().name!r}: it handles signals, which Python does "
                "in the main thread only; call it there"
            )
        return train_worker(self.config, self._process, self._launcher_pid, self._extensions, ends_process=ends_process)
