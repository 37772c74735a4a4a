"""Writes the control pages of this host's ranks: round, lease, the command to save, and what to record and stream.

A page is written only if something changed: a new black box, a renewed lease, a command, other recording settings or
deadlines.
"""

from __future__ import annotations

import logging
from pathlib import Path

from megatrain.contracts.black_box.reader import write_control
from megatrain.contracts.black_box.values import Command, ControlPage
from megatrain.contracts.errors import DataError
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.rounds import RoundDeadlines

_logger = logging.getLogger(__name__)
_NS = 1_000_000_000
_RENEWED_NS = _NS // 2
"""A lease counts as renewed if its end has moved by more than this; smaller differences are clock reading errors."""


class ControlPages:
    """Writes the control pages of the ranks of one round. Not thread-safe."""

    def __init__(self, round_number: int) -> None:
        self._round = round_number
        self._command_number = 0
        self._interval_ns = self._stop_ns = 0
        self._recording = DiagSettings()
        self._written: dict[int, ControlPage] = {}

    def command_checkpoint(self, number: int) -> None:
        """Set the command to save at a step on which all ranks agree. Takes effect with the next `write`."""
        self._command_number = max(self._command_number, number)

    def set_recording(self, settings: DiagSettings) -> None:
        """Set what the ranks record and the host streams. Takes effect with the next `write`."""
        self._recording = settings

    def set_deadlines(self, deadlines: RoundDeadlines) -> None:
        """Set the round's published interval and stop time. Takes effect with the next `write`."""
        self._interval_ns, self._stop_ns = int(deadlines.interval_s * _NS), int(deadlines.stop_s * _NS)

    def write(self, paths: dict[int, Path], lease_ok_until_ns: int, now_unix_s: float) -> None:
        """Write the changed pages of these ranks. After a time of full recording, the usual sample period applies."""
        page = ControlPage(
            command_number=self._command_number,
            command=Command.CHECKPOINT if self._command_number else Command.NONE,
            span_mask=self._recording.span_mask(),
            sample_period=self._recording.period_at(now_unix_s),
            lease_ok_until_ns=lease_ok_until_ns,
            round=self._round,
            interval_ns=self._interval_ns,
            stop_ns=self._stop_ns,
        )
        for rank, path in paths.items():
            before = self._written.get(rank)
            if before is not None and _is_equivalent(before, page):
                continue
            try:
                write_control(path, page)
            except DataError as error:
                # the rank has exited or its file was removed; if the rank still runs, the next poll tries again
                _logger.debug("rank %d: %s", rank, error)
                continue
            self._written[rank] = page


def _is_equivalent(before: ControlPage, page: ControlPage) -> bool:
    is_renewed = abs(page.lease_ok_until_ns - before.lease_ok_until_ns) > _RENEWED_NS

    def settings(page: ControlPage) -> tuple[int, ...]:
        return page.span_mask, page.sample_period, page.interval_ns, page.stop_ns, page.command_number

    return not is_renewed and settings(before) == settings(page)
