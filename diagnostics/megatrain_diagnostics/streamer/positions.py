"""How far a streamer has come, on disk: a new life goes on there; what it streams twice is known by its keys."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.record import decode, encode
from megatrain.contracts.whole_files import temporary_name
from megatrain_diagnostics.streamer.log_tail import LogPosition

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Positions:
    """`boxes`: RankTail.name -> last record; `logs`: "round/rank" -> where its log was read to."""

    boxes: Mapping[str, int] = field(default_factory=dict)
    logs: Mapping[str, LogPosition] = field(default_factory=dict)


def read_positions(path: Path) -> Positions:
    """Return what an earlier life kept; nothing where there was none, or the file is damaged."""
    try:
        return decode(Positions, path.read_bytes(), str(path))
    except FileNotFoundError:
        return Positions()
    except (OSError, CoordinationError) as error:
        _logger.warning("all that is still there is streamed anew: %s", error)
        return Positions()


def write_positions(path: Path, positions: Positions) -> None:
    """Keep how far it has come; where the disk is full, the last one stays."""
    half = path.with_name(temporary_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(encode(positions))
        half.replace(path)
    except OSError as error:
        _logger.warning("%s is not written: %s", path, error)
        half.unlink(missing_ok=True)
