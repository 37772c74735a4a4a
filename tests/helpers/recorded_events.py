"""The events in the black boxes of a job, as the streamer would read them."""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.black_box.values import ClockBase
from megatrain.run_files.run_directory import own_box_paths
from megatrain_diagnostics.events.tables import Table, joined
from megatrain_diagnostics.streamer.rank_tail import HostClock, RankTail
from tests.helpers.memory_events import MemoryEvents

_CLOCK = HostClock(ClockBase(monotonic_ns=0, unix_ns=1_700_000_000_000_000_000, error_ns=1))


def recorded_events(directory: Path) -> MemoryEvents:
    """Return all that the ranks of one job recorded in a `telemetry.black_box_directory`."""
    tables: dict[type[Table], list[Table]] = {}
    for path in own_box_paths(directory):
        tail = RankTail(path, _CLOCK)
        for kind, rows in tail.poll():
            tables.setdefault(kind, []).append(rows)
        tail.close()
    return MemoryEvents({kind: joined(kind, parts) for kind, parts in tables.items()})
