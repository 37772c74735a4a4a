"""How far a build has come, at which rate, and how long the rest will take: one line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatrain.formatting.quantities import bytes_text, seconds_text

_INTERVAL_S = 5.0


class BuildProgress:
    """Measures from its construction on: what an earlier, killed build did counts for the share, not for the rate."""

    def __init__(self, total_bytes: int, done_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Both in bytes of the corpus's files, as compressed as they are; `done_bytes` were read earlier."""
        self._total_bytes = total_bytes
        self._first_bytes = done_bytes
        self._clock = clock
        self._start_s = self._last_s = clock()
        self._text_bytes = 0
        self._num_tokens = 0

    def after(self, file_bytes: int, text_bytes: int, num_tokens: int) -> str | None:
        """Take a block into account; return a line when the last one is some seconds old.

        file_bytes: bytes of files read so far, in all. text_bytes, num_tokens: those of the block.
        """
        self._text_bytes += text_bytes
        self._num_tokens += num_tokens
        now_s = self._clock()
        if now_s - self._last_s < _INTERVAL_S:
            return None
        self._last_s = now_s
        passed_s = now_s - self._start_s
        line = (
            f"tokenizing: {bytes_text(file_bytes)} of {bytes_text(self._total_bytes)} "
            f"({_share(file_bytes, self._total_bytes):.0f} %), {bytes_text(round(self._text_bytes / passed_s))}/s of "
            f"text, {self._num_tokens / passed_s:,.0f} tokens/s"
        )
        new_bytes = file_bytes - self._first_bytes
        if new_bytes <= 0:
            return line
        left_s = max(0, self._total_bytes - file_bytes) * passed_s / new_bytes
        return f"{line}, {seconds_text(left_s)} left"


def _share(part: int, whole: int) -> float:
    return 100 * min(1.0, part / whole) if whole else 100.0
