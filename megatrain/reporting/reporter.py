"""Prints and stores the reports that the trainer makes, on the reporting rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from megatrain.config.config import Config
from megatrain.contracts.closable import Closable
from megatrain.contracts.layout import Layout
from megatrain.reporting.console import open_console
from megatrain.reporting.interval import IntervalBuilder
from megatrain.reporting.lines import RunProgress, evaluation_lines, progress_line, step_line
from megatrain.reporting.report import EvaluationReport, Report, StepReport
from megatrain.reporting.sinks import MetricSink, OpenSinks, open_sinks
from megatrain.run_files.run_directory import RunDirectory
from megatrain.telemetry.flops import compute_cost, device_name

if TYPE_CHECKING:
    import torch


class Reporter(Closable):
    """Prints a line every log.interval steps, at the first and at the last step, and writes to the metric sinks.

    Only rank 0 has a Reporter. It calls `check_run_lock` before each write to the run directory, which raises
    FencedError when a newer round writes there. Raises: ConfigError when a sink cannot be opened.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        device: torch.device,
        run_directory: RunDirectory,
        check_run_lock: Callable[[], None],
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        open_sinks: OpenSinks = open_sinks,
    ) -> None:
        self._interval = config.log.interval
        self._total_steps = config.train.steps
        self._clock = clock
        self.check_run_lock = check_run_lock
        self._device_word = "GPU" if device.type == "cuda" else "rank"
        self._console = open_console(stream or sys.stdout, os.environ, clock)
        self._broken_sinks: set[str] = set()
        self._sinks: list[MetricSink] = open_sinks(config, run_directory, self.print_line)
        name = device_name(device)
        cost = compute_cost(config, name)
        self._builder = IntervalBuilder(cost)
        self._first_step = 0
        self._first_at = 0.0
        self.print_line(f"ranks: {layout.world_size} ({layout}), each on {name}")
        self.print_line(cost.formula)

    def step(self, report: StepReport) -> None:
        """Report a finished step."""
        now = self._clock()
        is_first = self._first_step == 0
        if is_first:
            self._first_step, self._first_at = report.step, now
        self._builder.add(report, now)
        self._store(report)
        if is_first or report.step % self._interval == 0 or report.step == self._total_steps:
            self._finish_interval(now)
        if report.step < self._total_steps:
            progress = RunProgress(
                step=report.step,
                total_steps=self._total_steps,
                loss=report.loss,
                tokens_per_s=report.num_tokens / max(report.duration_s, 1e-9),
                remaining_s=self._remaining_s(report, now),
            )
            self._console.progress(lambda width: progress_line(progress, width))

    def evaluation(self, report: EvaluationReport) -> None:
        """Report an evaluation."""
        self._store(report)
        for line in evaluation_lines(report):
            self._console.line(line)

    def print_line(self, text: str) -> None:
        """Print a line of text."""
        self._console.line(text)

    def close(self) -> None:
        """Print the line of the remaining steps, and close the sinks. `print_line` still works after that."""
        try:
            if not self._builder.is_empty:
                self._finish_interval(self._clock())
        finally:
            self._console.close()
            sinks, self._sinks = self._sinks, []
            for sink in sinks:
                try:
                    sink.close()
                except OSError as error:
                    self.print_line(f"metrics: {sink.name} may lack the last records: {error}")

    def _finish_interval(self, now: float) -> None:
        report = self._builder.finish(now)
        self._store(report)
        self._console.line(step_line(report, self._total_steps, self._device_word))

    def _remaining_s(self, report: StepReport, now: float) -> float:
        num_steps = report.step - self._first_step
        # The first step compiles and allocates, so its duration does not predict the other steps.
        step_s = (now - self._first_at) / num_steps if num_steps else report.duration_s
        return step_s * (self._total_steps - report.step)

    def _store(self, report: Report) -> None:
        """Write a report to the sinks. If a sink fails, a note names the sink, and the run continues."""
        self.check_run_lock()
        for sink in self._sinks:
            try:
                sink.write(report)
            except OSError as error:
                if sink.name not in self._broken_sinks:
                    self._broken_sinks.add(sink.name)
                    self.print_line(f"metrics: {sink.name} cannot be written ({error}); training continues and retries")
            else:
                if sink.name in self._broken_sinks:
                    self._broken_sinks.remove(sink.name)
                    self.print_line(f"metrics: {sink.name} is written again from step {report.step} on")
