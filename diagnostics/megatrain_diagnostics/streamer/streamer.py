"""The loop of a host's streamer: it polls black boxes, logs and devices, and sends new rows to the daemon.

Totals and values of all steps are streamed, and the spans of sampled steps and of rare operations. When a rank makes no
progress, the newest spans of all ranks of the host, ended or open, are streamed too; when a rank died, its own. No
process waits for the streamer: records that it does not read in time are overwritten and counted as lost.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.files.whole_files import temporary_name
from megatrain.contracts.records.record import decode, encode
from megatrain.formatting import ranks_text
from megatrain_diagnostics.events.tables import LogLines, Table, joined, num_rows
from megatrain_diagnostics.metrics.readings import HostReading
from megatrain_diagnostics.streamer.host_boxes import HostBoxes
from megatrain_diagnostics.streamer.host_devices import DeviceSource, HostDevices
from megatrain_diagnostics.streamer.host_reading import host_reading, rank_reading
from megatrain_diagnostics.streamer.log_tail import HostLogs, LogPosition
from megatrain_diagnostics.streamer.rank_tail import HostClock, RankTail
from megatrain_diagnostics.streamer.settings import StreamerSettings
from megatrain_diagnostics.streamer.silence import HostRanks, SilenceWatch
from megatrain_diagnostics.wire.sender import SenderState

_logger = logging.getLogger(__name__)
_POLL_S = 0.4
"""Time between two polls. With MAX_AGE_S, a row is sent at most about 1.6 s after its record has ended."""
_FIND_S = 0.8
_EARLY = 0.5
"""Fraction of the time limit of a phase after which stacks are dumped. At the limit the driver ends processes."""
_KEEP_S = 5.0
"""Time between two writes of the positions."""
MAX_ROWS = 512
MAX_AGE_S = 1.0


class EventSender(Protocol):
    """The receiver of the tables: wire.sender.Sender."""

    def send(self, kind: Any, table: Any) -> None: ...

    def state(self) -> SenderState: ...


class Streamer:
    """Streams black boxes and logs of a host's ranks. `poll` and `end` are for one thread, `reading` for any."""

    def __init__(
        self,
        settings: StreamerSettings,
        clock: HostClock,
        sender: EventSender,
        expected: Callable[[], HostRanks],
        on_silence: Callable[[tuple[int, ...]], None] = lambda ranks: None,
        devices: DeviceSource | None = None,
    ) -> None:
        """`expected`: the ranks that the host should have; `on_silence` is called with ranks at half their time limit.

        `devices`: the reader of the host's GPUs and network interfaces; None: devices are not read.
        """
        self._settings, self._clock, self._sender = settings, clock, sender
        self._expected, self._on_silence = expected, on_silence
        self._place = settings.own_directory / "positions.json"
        kept = read_positions(self._place)
        self._boxes = HostBoxes(
            Path(settings.black_box_directory),
            settings.box_prefix,
            settings.host,
            clock,
            lambda name: kept.boxes.get(name, 0),
        )
        self._logs = HostLogs(Path(settings.host_logs), settings.host, kept.logs.get)
        self._batcher = Batcher(sender.send)
        self._devices = HostDevices(settings.host, os.environ.get("CUDA_VISIBLE_DEVICES"), devices)
        self._silence = SilenceWatch(settings.phase_timeouts)
        self._early_silence = SilenceWatch(settings.phase_timeouts.scaled(_EARLY))
        self._silent: tuple[int, ...] = ()
        self._silent_soon: tuple[int, ...] = ()
        self._due = {"find": 0.0, "keep": 0.0}

    def run(self, closed: threading.Event) -> None:
        """Stream until `closed` is set."""
        while not closed.is_set():
            self.poll(time.monotonic())
            closed.wait(_POLL_S)
        self.end()

    def poll(self, now_s: float) -> None:
        """Read everything once, and send the tables that are due."""
        if self._is_due("find", now_s, _FIND_S):
            if self._settings.black_box_directory:
                self._boxes.find()
            self._logs.find()
            self._watch_silence(now_s)
        for kind, table in self._boxes.poll():
            self._batcher.add(kind, table, now_s)
        self._batcher.add(LogLines, self._logs.poll(self._clock.now_ns()), now_s)
        for kind, table in self._devices.poll(self._newest(), self._expected().round, self._clock.now_ns()):
            self._batcher.add(kind, table, now_s)
        self._batcher.flush(now_s)
        if self._is_due("keep", now_s, _KEEP_S):
            self._keep()

    def end(self) -> None:
        """Read everything for the last time and pass it to the sender; `Sender.close` then delivers it."""
        now_s = time.monotonic()
        for _ in range(2):  # the second poll reads the last records of ranks that the first poll finds dead
            self._due["find"] = 0.0
            self.poll(now_s)
        self._batcher.flush(now_s, is_all=True)
        write_positions(self._place, self._positions())
        self._boxes.close()
        self._logs.close()

    def _is_due(self, what: str, now_s: float, period_s: float) -> bool:
        if now_s < self._due[what]:
            return False
        self._due[what] = now_s + period_s
        return True

    def _newest(self) -> tuple[RankTail, ...]:
        return self._boxes.newest(self._expected().round)

    def _watch_silence(self, now_s: float) -> None:
        tails, expected = self._newest(), self._expected()
        before, self._silent_soon = self._silent_soon, self._early_silence.silent(tails, expected)
        if soon := tuple(sorted(set(self._silent_soon) - set(before))):
            self._on_silence(soon)
        before, self._silent = self._silent, self._silence.silent(tails, expected)
        fresh = tuple(sorted(set(self._silent) - set(before)))
        if not fresh:
            return
        verb = "is" if len(fresh) == 1 else "are"
        _logger.warning("%s %s silent: sending the newest records of all ranks of this host", ranks_text(fresh), verb)
        for kind, table in self._boxes.evidence(tails):
            self._batcher.add(kind, table, now_s)

    def _keep(self) -> None:
        """Write the positions if the daemon has everything; otherwise a restarted streamer must send rows again."""
        if self._sender.state().outbox.num_batches == 0 and not self._batcher.has_waiting:
            write_positions(self._place, self._positions())

    def _positions(self) -> Positions:
        return Positions({tail.name: tail.position for tail in self._boxes.tails}, self._logs.positions())

    def reading(self) -> HostReading:
        """Return the state of the host at the last poll."""
        boxes = self._boxes
        return host_reading(
            self._settings.job,
            self._settings.host,
            [rank_reading(tail, self._clock, gpu_uuid) for tail, gpu_uuid in self._devices.with_gpus(self._newest())],
            self._sender.state(),
            self._batcher.num_sent,
            boxes.num_lost + sum(tail.num_lost for tail in boxes.tails),
            boxes.num_invalid + sum(tail.num_invalid for tail in boxes.tails),
            len(self._silent),
            self._devices.reading,
        )


class Batcher:
    """Collects tables by kind until there are 512 rows, or the oldest has waited for a second. For one thread."""

    def __init__(self, send: Callable[[Any, Any], None]) -> None:
        self._send = send
        self._waiting: dict[type[Table], list[Any]] = {}
        self._num_rows: dict[type[Table], int] = {}
        self._oldest_s: dict[type[Table], float] = {}
        self.num_sent: dict[str, int] = {}
        """Table name -> number of rows passed to `send`."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, kind: type[Table], table: Table, now_s: float) -> None:
        count = num_rows(table)
        if count:
            self._waiting.setdefault(kind, []).append(table)
            self._num_rows[kind] = self._num_rows.get(kind, 0) + count
            self._oldest_s.setdefault(kind, now_s)

    def flush(self, now_s: float, *, is_all: bool = False) -> None:
        """Send the tables that are due; with `is_all`, all tables."""
        for kind in list(self._waiting):
            if is_all or self._num_rows[kind] >= MAX_ROWS or now_s - self._oldest_s[kind] >= MAX_AGE_S:
                del self._oldest_s[kind]
                count = self._num_rows.pop(kind)
                self.num_sent[kind.NAME] = self.num_sent.get(kind.NAME, 0) + count
                self._send(kind, joined(kind, self._waiting.pop(kind)))


@dataclass(frozen=True, slots=True)
class Positions:
    """The position up to which a streamer has read. A restarted streamer continues there, and may send some rows twice.

    `boxes`: RankTail.name -> last record; `logs`: "round/rank" -> position in its log.
    """

    boxes: Mapping[str, int] = field(default_factory=dict)
    logs: Mapping[str, LogPosition] = field(default_factory=dict)


def read_positions(path: Path) -> Positions:
    """Return the positions of an earlier streamer process; empty if there is no file, or it is damaged."""
    try:
        return decode(Positions, path.read_bytes(), str(path))
    except FileNotFoundError:
        return Positions()
    except (OSError, CoordinationError) as error:
        _logger.warning("black boxes and logs are streamed from their beginning again: %s", error)
        return Positions()


def write_positions(path: Path, positions: Positions) -> None:
    """Write the positions; if that fails, log a warning and keep the old file."""
    half = path.with_name(temporary_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(encode(positions))
        half.replace(path)
    except OSError as error:
        _logger.warning("%s cannot be written: %s", path, error)
        with suppress(OSError):  # a read-only file system raises it even if there is no file
            half.unlink()
