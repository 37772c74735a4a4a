"""Accepted and rejected rows: counted by reason and host for /metrics, and logged now and then."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatrain.contracts.printable import printable
from megatrain.contracts.texts import count_text

_logger = logging.getLogger(__name__)
_MAX_KEYS = 10_000
"""Pairs of reason and host that are counted separately; further ones count under the host "others"."""
OTHERS = "others"


class Reason(StrEnum):
    """Why rows, or a whole batch, were not taken."""

    BAD_HEADER = "bad-header"
    NO_BATCH = "no-batch"
    """Not Arrow's bytes, or not one batch of the table that the header names."""
    UNKNOWN_TABLE = "unknown-table"
    FOREIGN_HOST = "foreign-host"
    """Rows that name another host than the one that streams them."""
    OUT_OF_RANGE = "out-of-range"
    """A rank beyond the round's, a negative duration, a step that cannot be."""
    FROM_THE_FUTURE = "from-the-future"
    """More than an hour after their batch was made, by the same clock."""
    UNKNOWN_ROUND = "unknown-round"
    """Of a round far beyond the newest."""
    FLOOD = "flood"
    """More rows from one rank than is sustained."""


@dataclass(frozen=True, slots=True)
class IngestCounters:
    """Since the daemon began. Rows by table; what was refused by (reason, host)."""

    batches: int
    num_bytes: int
    stored_rows: Mapping[str, int]
    duplicate_batches: int
    old_rows: int
    """Of rounds that are over: stored, and not judged."""
    refused_rows: Mapping[tuple[Reason, str], int]
    refused_batches: Mapping[tuple[Reason, str], int]
    """As a whole: how many rows they had is not known."""
    dropped_rows: Mapping[str, int]
    """That hosts had to give up before they could send them, by host."""
    refused_handshakes: int
    streams: int
    """Open now."""
    connected: tuple[str, ...]
    """Hosts that have a stream open."""
    commits: int
    failed_commits: int
    last_commit_s: float
    """That the newest commit took."""
    unjudged_rows: int
    """That the live detection was too slow for; they are stored."""


class Ledger:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._stored_rows: Counter[str] = Counter()
        self._refused_rows: Counter[tuple[Reason, str]] = Counter()
        self._refused_batches: Counter[tuple[Reason, str]] = Counter()
        self._dropped_rows: dict[str, dict[str, int]] = {}
        self._open_streams: Counter[str] = Counter()
        self._last_commit_s = 0.0
        self._last_refusal = ""
        self._examples: dict[Reason, str] = {}

    def note_batch(self, num_bytes: int, *, is_duplicate: bool = False) -> None:
        with self._lock:
            self._numbers["duplicate_batches" if is_duplicate else "batches"] += 1
            self._numbers["num_bytes"] += num_bytes

    def note_refused_rows(self, reason: Reason, host: str, num_rows: int) -> None:
        with self._lock:
            self._refused_rows[self._key(self._refused_rows, reason, host)] += num_rows

    def note_refused_batch(self, reason: Reason, host: str, example: str) -> None:
        """Count a batch that was refused as a whole; `example` says what was wrong with it."""
        with self._lock:
            self._refused_batches[self._key(self._refused_batches, reason, host)] += 1
            self._examples[reason] = example

    def note_old_rows(self, num_rows: int) -> None:
        with self._lock:
            self._numbers["old_rows"] += num_rows

    def note_unjudged_rows(self, num_rows: int) -> None:
        with self._lock:
            self._numbers["unjudged_rows"] += num_rows

    def note_dropped(self, host: str, session: str, num_rows: int) -> None:
        """Take what a session says that it has dropped since it began."""
        with self._lock:
            if num_rows and (host in self._dropped_rows or len(self._dropped_rows) < _MAX_KEYS):
                sessions = self._dropped_rows.setdefault(host, {})
                sessions[session] = max(num_rows, sessions.get(session, 0))

    def note_commit(self, rows: Mapping[str, int], seconds: float) -> None:
        with self._lock:
            self._stored_rows.update(rows)
            self._numbers["commits"] += 1
            self._last_commit_s = seconds

    def note_failed_commit(self) -> None:
        with self._lock:
            self._numbers["failed_commits"] += 1

    def note_refused_handshake(self, reason: str) -> None:
        with self._lock:
            self._numbers["refused_handshakes"] += 1
            self._last_refusal = reason

    def note_stream(self, change: int, host: str) -> None:
        """Count a stream that opened, 1, or ended, -1."""
        with self._lock:
            self._numbers["streams"] += change
            self._open_streams[host] += change
            if not self._open_streams[host]:
                del self._open_streams[host]

    def counters(self) -> IngestCounters:
        """Return what was counted so far."""
        with self._lock:
            numbers = self._numbers
            return IngestCounters(
                batches=numbers["batches"],
                num_bytes=numbers["num_bytes"],
                stored_rows=dict(self._stored_rows),
                duplicate_batches=numbers["duplicate_batches"],
                old_rows=numbers["old_rows"],
                refused_rows=dict(self._refused_rows),
                refused_batches=dict(self._refused_batches),
                dropped_rows={host: sum(sessions.values()) for host, sessions in self._dropped_rows.items()},
                refused_handshakes=numbers["refused_handshakes"],
                streams=numbers["streams"],
                connected=tuple(sorted(self._open_streams)),
                commits=numbers["commits"],
                failed_commits=numbers["failed_commits"],
                last_commit_s=self._last_commit_s,
                unjudged_rows=numbers["unjudged_rows"],
            )

    def examples(self) -> tuple[Mapping[Reason, str], str]:
        """Return the newest refused batch of each reason, and the newest refused handshake, in words."""
        with self._lock:
            return dict(self._examples), self._last_refusal

    @staticmethod
    def _key(counter: Counter[tuple[Reason, str]], reason: Reason, host: str) -> tuple[Reason, str]:
        key = (reason, host)
        return key if key in counter or len(counter) < _MAX_KEYS else (reason, OTHERS)


class Teller:
    """Writes to the log what was lost since it last did, at most once a period."""

    def __init__(self, ledger: Ledger, period_s: float = 60.0) -> None:
        self._ledger, self._period_s = ledger, period_s
        self._told = ledger.counters()
        self._next_s = float("-inf")

    def tell(self, now_s: float) -> list[str]:
        """Log what is new, when it is time; return the lines. `now_s`: of a monotonic clock."""
        if now_s < self._next_s:
            return []
        counters = self._ledger.counters()
        lines = self._news(counters)
        if lines:
            self._next_s = now_s + self._period_s
            self._told = counters
        for line in lines:
            _logger.warning("%s", printable(line))
        return lines

    def _news(self, now: IngestCounters) -> list[str]:
        examples, last_refusal = self._ledger.examples()
        lines = []
        for what, new, old in (
            ("row", now.refused_rows, self._told.refused_rows),
            ("batch", now.refused_batches, self._told.refused_batches),
        ):
            for (reason, host), number in sorted(new.items()):
                more = number - old.get((reason, host), 0)
                example = f", the last: {examples[reason]}" if what == "batch" and reason in examples else ""
                if more:
                    text = count_text(more, what, "batches" if what == "batch" else "")
                    lines.append(f"host {host}: {text} not taken: {reason}{example}")
        for host, number in sorted(now.dropped_rows.items()):
            if more := number - self._told.dropped_rows.get(host, 0):
                lines.append(f"host {host} has dropped {count_text(more, 'row')} that did not fit its spool")
        if more := now.refused_handshakes - self._told.refused_handshakes:
            lines.append(f"{count_text(more, 'stream')} refused, the last: {last_refusal}")
        if more := now.unjudged_rows - self._told.unjudged_rows:
            lines.append(f"{count_text(more, 'row')} stored, and too many at once for the live detection")
        return lines
