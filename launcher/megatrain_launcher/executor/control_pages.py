"""The control pages of this host's ranks: the round, until when the lease is good, and the command to save.

A page is written when a rank's black box appears, when the lease was renewed, and when a command came; never in
between, so that a worker sees a change only when there is one.
"""

from __future__ import annotations

import logging
from pathlib import Path

from megatrain.contracts.black_box import write_control
from megatrain.contracts.black_box_values import Command, ControlPage
from megatrain.contracts.errors import DataError

_logger = logging.getLogger(__name__)
_NS = 1_000_000_000
_RENEWED_NS = _NS // 2
"""A lease counts as renewed when its end has moved by so much: reading two clocks is not exact."""


class ControlPages:
    """Writes the pages of the ranks of one round. For one thread."""

    def __init__(self, round_number: int) -> None:
        self._round = round_number
        self._command_number = 0
        self._written: dict[int, ControlPage] = {}

    def command_checkpoint(self, number: int) -> None:
        """Have the ranks save at the next step that all agree on, at the next `write`."""
        self._command_number = max(self._command_number, number)

    def write(self, paths: dict[int, Path], lease_ok_until_ns: int) -> None:
        """Bring the pages of these ranks up to date."""
        for rank, path in paths.items():
            before = self._written.get(rank)
            if before is not None:
                is_renewed = abs(lease_ok_until_ns - before.lease_ok_until_ns) > _RENEWED_NS
                if not is_renewed and before.command_number == self._command_number:
                    continue
            page = ControlPage(
                command_number=self._command_number,
                command=Command.CHECKPOINT if self._command_number else Command.NONE,
                lease_ok_until_ns=lease_ok_until_ns,
                round=self._round,
            )
            try:
                write_control(path, page)
            except DataError as error:
                # the rank has ended, or its file was taken away; should it still be there, the next look writes
                _logger.debug("rank %d: %s", rank, error)
                continue
            self._written[rank] = page
