"""The positions up to which a streamer has read, on disk: a restarted streamer continues there.

It may stream some rows twice; their keys identify them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.whole_files import temporary_name
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.streamer.log_tail import LogPosition

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Positions:
    """`boxes`: RankTail.name -> last record; `logs`: "round/rank" -> how far its log was read."""

    boxes: Mapping[str, int] = field(default_factory=dict)
    logs: Mapping[str, LogPosition] = field(default_factory=dict)


def read_positions(path: Path) -> Positions:
    """Return the positions of an earlier life; none where there was none, or the file is damaged."""
    try:
        return decode(Positions, path.read_bytes(), str(path))
    except FileNotFoundError:
        return Positions()
    except (OSError, CoordinationError) as error:
        _logger.warning("everything that is still available is streamed again: %s", error)
        return Positions()


def write_positions(path: Path, positions: Positions) -> None:
    """Keep the positions; where the disk is full, the last file stays."""
    half = path.with_name(temporary_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(encode(positions))
        half.replace(path)
    except OSError as error:
        _logger.warning("%s cannot be written: %s", path, error)
        half.unlink(missing_ok=True)
