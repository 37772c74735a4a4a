"""The control pages of this host's ranks: round, lease, the command to save, and what is recorded and streamed.

A page is written when a rank's black box appears, the lease was renewed, a command arrived, or the recording settings
or the deadlines changed; never otherwise, so a worker sees a change only when there is one.
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
"""A lease counts as renewed when its end has moved by this much: reading two clocks is not exact."""


class ControlPages:
    """Writes the pages of the ranks of one round. For one thread."""

    def __init__(self, round_number: int) -> None:
        self._round = round_number
        self._command_number = 0
        self._interval_ns = self._stop_ns = 0
        self._recording = DiagSettings()
        self._written: dict[int, ControlPage] = {}

    def command_checkpoint(self, number: int) -> None:
        """Make the ranks save at the next step that all agree on, from the next `write` on."""
        self._command_number = max(self._command_number, number)

    def set_recording(self, settings: DiagSettings) -> None:
        """Make the ranks record, and their host stream, what the settings specify, from the next `write` on."""
        self._recording = settings

    def set_deadlines(self, deadlines: RoundDeadlines) -> None:
        """Make the ranks use a round's deadlines between steps and for a stop, from the next `write` on."""
        self._interval_ns, self._stop_ns = int(deadlines.interval_s * _NS), int(deadlines.stop_s * _NS)

    def write(self, paths: dict[int, Path], lease_ok_until_ns: int, now_unix_s: float) -> None:
        """Bring the pages of these ranks up to date. A burst of full steps that is over by `now_unix_s` ends here."""
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
                # the rank has ended, or its file was removed; if the rank still runs, the next poll writes
                _logger.debug("rank %d: %s", rank, error)
                continue
            self._written[rank] = page


def _is_equivalent(before: ControlPage, page: ControlPage) -> bool:
    is_renewed = abs(page.lease_ok_until_ns - before.lease_ok_until_ns) > _RENEWED_NS

    def settings(one: ControlPage) -> tuple[int, ...]:
        return one.span_mask, one.sample_period, one.interval_ns, one.stop_ns, one.command_number

    return not is_renewed and settings(before) == settings(page)
