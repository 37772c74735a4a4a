"""Metrics as TensorBoard event files: the scalars of `curves`, such as step/loss."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard.writer import SummaryWriter

from megatrain.contracts.files.vanished_files import WatchedPath
from megatrain.reporting.report import Report, curves

_FLUSH_INTERVAL_S = 10


class TensorBoardSink:
    """Writes event files under `directory`: a new one at each start of the run and after a removal of the directory."""

    def __init__(self, directory: Path) -> None:
        self.name = f"TensorBoard ({directory})"
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._watched = WatchedPath(directory)

    def write(self, report: Report) -> None:
        """Add the scalars of a report."""
        if self._watched.was_lost() and self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            # The first report shows the step at which a resumed run continues. TensorBoard hides what an earlier start
            # wrote from that step on.
            self._writer = SummaryWriter(self._directory, purge_step=report.step, flush_secs=_FLUSH_INTERVAL_S)
            self._watched.was_lost()  # the directory exists now, and is watched from this point on
        for name, value in curves(report).items():
            if value is not None:
                self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
        self._watched.close()
