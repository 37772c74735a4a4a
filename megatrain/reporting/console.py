"""Prints the reporting rank's lines, and on a terminal a progress line below them that is rewritten in place.

If the stream breaks (a pipe has no reader any more, the terminal is closed), printing stops and training continues. The
metric files contain all reports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TextIO

REDRAW_INTERVAL_S = 0.1
"""The shortest time between two drawings of the progress line, so that drawing costs little time."""
_FALLBACK_COLUMNS = 80
_ERASE_LINE = "\r\x1b[K"
_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"


class Console:
    """Prints lines, and a progress line if `is_terminal`. Made by `open_console`."""

    def __init__(
        self,
        stream: TextIO,
        *,
        is_terminal: bool,
        has_color: bool,
        columns: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._stream = stream
        self._is_terminal = is_terminal
        self._has_color = has_color
        self._columns = columns
        self._clock = clock
        self._is_progress_shown = False
        self._drawn_at = -REDRAW_INTERVAL_S
        self._is_broken = False

    def line(self, text: str) -> None:
        """Print a line. It replaces the progress line, which appears below it at the next drawing."""
        self._write(self._erasure() + text + "\n")
        self._drawn_at = -REDRAW_INTERVAL_S

    def progress(self, text_of_width: Callable[[int], str]) -> None:
        """Rewrite the progress line. `text_of_width` returns a text of at most the given width.

        Does nothing without a terminal, or within REDRAW_INTERVAL_S of the last drawing.
        """
        now = self._clock()
        if not self._is_terminal or now - self._drawn_at < REDRAW_INTERVAL_S:
            return
        self._drawn_at = now
        # A character in the last column makes some terminals wrap, and a wrapped line cannot be rewritten.
        text = text_of_width(max(1, self._columns() - 1))
        self._write(self._erasure() + (f"{_DIM}{text}{_NORMAL}" if self._has_color else text))
        self._is_progress_shown = True

    def close(self) -> None:
        """Erase the progress line."""
        if self._is_progress_shown:
            self._write(self._erasure())

    def _erasure(self) -> str:
        if not self._is_progress_shown:
            return ""
        self._is_progress_shown = False
        return _ERASE_LINE

    def _write(self, text: str) -> None:
        if self._is_broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._is_broken = True


def open_console(stream: TextIO, environment: Mapping[str, str], clock: Callable[[], float]) -> Console:
    """Return the console of a stream: with progress on a terminal, with color unless NO_COLOR is set."""
    is_terminal = stream.isatty() and environment.get("TERM") != "dumb"
    return Console(
        stream,
        is_terminal=is_terminal,
        has_color=not environment.get("NO_COLOR"),
        columns=lambda: _columns_of(stream),
        clock=clock,
    )


def _columns_of(stream: TextIO) -> int:
    try:
        # a terminal whose size was never set has 0 columns
        return os.get_terminal_size(stream.fileno()).columns or _FALLBACK_COLUMNS
    except OSError:
        return _FALLBACK_COLUMNS
