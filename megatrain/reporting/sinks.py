"""Where reports go besides the console: the protocol of a sink, and opening the sinks of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol, TypeAlias

from megatrain.config.config import Config
from megatrain.config.recording import LogConfig
from megatrain.contracts.errors import ConfigError
from megatrain.reporting.jsonl_sink import JsonLinesSink
from megatrain.reporting.report import Report
from megatrain.run_files.run_directory import RunDirectory


class MetricSink(Protocol):
    """Receives every report, in order."""

    name: str
    """The name of the sink in messages."""

    def write(self, report: Report) -> None:
        """Store a report.

        Raises: OSError when the report cannot be stored; the reporter still calls `write` with the next report.
        """

    def close(self) -> None:
        """Store buffered reports, and release the resources."""


OpenSinks: TypeAlias = Callable[[Config, RunDirectory, Callable[[str], None]], list[MetricSink]]
"""Opens the sinks of a configuration in a run directory; the last argument prints a message."""


def missing_packages(log: LogConfig) -> list[str]:
    """Return a problem for each package that the section [log] needs and that is not installed.

    Every rank calls this before it joins a process group, so that no rank fails while others wait for it.
    """
    wanted = {"tensorboard": log.has_tensorboard, "wandb": log.has_wandb}
    return [
        f"log.has_{package}=true needs the package {package}; pip install 'megatrain[{package}]', or set "
        f"log.has_{package}=false"
        for package, is_wanted in wanted.items()
        if is_wanted and find_spec(package) is None
    ]


def open_sinks(config: Config, run_directory: RunDirectory, print_line: Callable[[str], None]) -> list[MetricSink]:
    """Open the sinks that the configuration selects; `print_line` prints messages about them for the user.

    Raises: ConfigError when a package is missing or the file of metrics cannot be opened.
    """
    problems = missing_packages(config.log)
    if problems:
        raise ConfigError(problems)
    sinks: list[MetricSink] = [JsonLinesSink(run_directory.metrics_file, print_line)]
    # Imported here because tensorboard and wandb are optional, and the first also loads torch.utils.tensorboard.
    if config.log.has_tensorboard:
        from megatrain.reporting.tensorboard_sink import TensorBoardSink

        sinks.append(TensorBoardSink(run_directory.metrics / "tensorboard"))
    if config.log.has_wandb:
        from megatrain.reporting.wandb_sink import WandbSink

        sinks.append(WandbSink(config, run_directory.metrics, print_line))
    return sinks
