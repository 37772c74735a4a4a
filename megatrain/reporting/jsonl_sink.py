"""Metrics as lines of JSON. A resumed run appends to the same file. Format: docs/guides/metrics.md."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatrain.contracts.errors import ConfigError
from megatrain.contracts.files.vanished_files import is_in_place
from megatrain.reporting.report import FORMAT_VERSION, Report


class JsonLinesSink:
    """Appends one object per report. Each line is one write, so that a killed run does not leave half a line.

    If the file was removed, the sink creates it again and prints a message through `print_line`.
    Raises: ConfigError when the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        print_line: Callable[[str], None] = lambda text: None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self.name = str(path)
        self._path = path
        self._print_line = print_line
        self._unix_time = unix_time
        self._fd = -1
        self._is_line_open = False
        try:
            self._open()
        except OSError as error:
            raise ConfigError(
                [f"{path}: cannot be written: {error.strerror}; choose another job.run_directory"]
            ) from error

    def write(self, report: Report) -> None:
        """Append a report."""
        if self._fd < 0 or not is_in_place(self._fd, self._path):
            self.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
            self._print_line(
                f"metrics: {self._path} was removed from outside; its records before step {report.step} are lost"
            )
        record = {
            "version": FORMAT_VERSION,
            "kind": report.kind,
            "unix_time_s": self._unix_time(),
            **_json_value(asdict(report)),
        }
        data = json.dumps(record, allow_nan=False).encode() + b"\n"
        if self._is_line_open:
            # A crash or a full disk has cut the last line off; the new line must not become part of it.
            data = b"\n" + data
        written = os.write(self._fd, data)
        self._is_line_open = written < len(data)
        if self._is_line_open:
            raise OSError(f"only {written} of {len(data)} bytes were written; is the disk full?")

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            handle, self._fd = self._fd, -1
            os.close(handle)

    def _open(self) -> None:
        self._fd = -1
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._fd).st_size
        self._is_line_open = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"


def _json_value(value: Any) -> Any:
    """Return a value for JSON: NaN and infinity, which JSON does not have, are replaced by None at all levels."""
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
