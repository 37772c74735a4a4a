"""Accepted and rejected rows: counted by reason and host for /metrics, and logged periodically."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatrain.formatting import count_text, printable

_logger = logging.getLogger(__name__)
_MAX_KEYS = 10_000
"""Limit of pairs of reason and host that are counted separately; further hosts are counted as "others"."""
OTHERS = "others"
_REPORT_S = 60.0
"""Time between two reports of lost rows."""


class RejectionReason(StrEnum):
    """The reason why rows, or a whole batch, were rejected."""

    BAD_HEADER = "bad-header"
    NO_BATCH = "no-batch"
    """The content is not Arrow data, or not exactly one batch of the table that the header names."""
    UNKNOWN_TABLE = "unknown-table"
    FOREIGN_HOST = "foreign-host"
    """Rows with a host name that differs from the sender's."""
    OUT_OF_RANGE = "out-of-range"
    """Rows with an impossible value, such as a rank that the round does not have. A duration of -1 is valid."""
    FROM_THE_FUTURE = "from-the-future"
    """Rows with a time more than one hour after their batch was made, by the same clock."""
    UNKNOWN_ROUND = "unknown-round"
    """Rows of a round far beyond the newest one."""
    FLOOD = "flood"
    """More rows from one rank than its rate limit allows."""


@dataclass(frozen=True, slots=True)
class IngestCounters:
    """Counts since the daemon started. Rows by table; rejections by (reason, host)."""

    batches: int
    num_bytes: int
    stored_rows: Mapping[str, int]
    duplicate_batches: int
    old_rows: int
    """Rows of rounds that have ended: stored but not analyzed."""
    refused_rows: Mapping[tuple[RejectionReason, str], int]
    refused_batches: Mapping[tuple[RejectionReason, str], int]
    """Batches that were rejected entirely; their number of rows is not known."""
    dropped_rows: Mapping[str, int]
    """Rows that hosts had to drop before they could send them, by host."""
    refused_handshakes: int
    connected: tuple[str, ...]
    """Hosts with an open stream."""
    failed_commits: int
    """Attempts to store rows that failed; the rows are stored by a later attempt."""
    skipped_rows: int
    """Rows that the live detection skipped, because too many waited for it or for their round; they are stored."""


class IngestStatistics:
    """Counts rows, batches and streams; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._stored_rows: Counter[str] = Counter()
        self._refused_rows: Counter[tuple[RejectionReason, str]] = Counter()
        self._refused_batches: Counter[tuple[RejectionReason, str]] = Counter()
        self._dropped_rows: dict[str, dict[str, int]] = {}
        self._open_streams: Counter[str] = Counter()
        self._last_refusal = ""
        self._examples: dict[RejectionReason, str] = {}

    def count_batch(self, num_bytes: int, *, is_duplicate: bool = False) -> None:
        with self._lock:
            self._numbers["duplicate_batches" if is_duplicate else "batches"] += 1
            self._numbers["num_bytes"] += num_bytes

    def count_refused_rows(self, reason: RejectionReason, host: str, num_rows: int) -> None:
        with self._lock:
            self._refused_rows[self._key(self._refused_rows, reason, host)] += num_rows

    def count_refused_batch(self, reason: RejectionReason, host: str, example: str) -> None:
        """Count a batch that was rejected entirely; `example` describes the reason."""
        with self._lock:
            self._refused_batches[self._key(self._refused_batches, reason, host)] += 1
            self._examples[reason] = example

    def count_old_rows(self, num_rows: int) -> None:
        with self._lock:
            self._numbers["old_rows"] += num_rows

    def count_skipped_rows(self, num_rows: int) -> None:
        with self._lock:
            self._numbers["skipped_rows"] += num_rows

    def record_dropped_rows(self, host: str, session: str, num_rows: int) -> None:
        """Record how many rows a session has dropped since it began, as reported by its sender."""
        with self._lock:
            if num_rows and (host in self._dropped_rows or len(self._dropped_rows) < _MAX_KEYS):
                sessions = self._dropped_rows.setdefault(host, {})
                sessions[session] = max(num_rows, sessions.get(session, 0))

    def count_commit(self, rows: Mapping[str, int]) -> None:
        with self._lock:
            self._stored_rows.update(rows)

    def count_failed_commit(self) -> None:
        with self._lock:
            self._numbers["failed_commits"] += 1

    def count_refused_handshake(self, reason: str) -> None:
        with self._lock:
            self._numbers["refused_handshakes"] += 1
            self._last_refusal = reason

    def count_stream(self, change: int, host: str) -> None:
        """Count a stream that opened (`change` 1) or ended (-1)."""
        with self._lock:
            self._open_streams[host] += change
            if not self._open_streams[host]:
                del self._open_streams[host]

    def counters(self) -> IngestCounters:
        """Return the counts so far."""
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
                connected=tuple(sorted(self._open_streams)),
                failed_commits=numbers["failed_commits"],
                skipped_rows=numbers["skipped_rows"],
            )

    def examples(self) -> tuple[Mapping[RejectionReason, str], str]:
        """Return texts: reason -> why its newest batch was rejected, and why the newest handshake was refused."""
        with self._lock:
            return dict(self._examples), self._last_refusal

    @staticmethod
    def _key(
        counter: Counter[tuple[RejectionReason, str]], reason: RejectionReason, host: str
    ) -> tuple[RejectionReason, str]:
        key = (reason, host)
        return key if key in counter or len(counter) < _MAX_KEYS else (reason, OTHERS)


class LostRowsReporter:
    """Logs the rows lost since its last report, at most once a minute."""

    def __init__(self, statistics: IngestStatistics) -> None:
        self._statistics = statistics
        self._reported = statistics.counters()
        self._next_s = float("-inf")

    def report(self, now_s: float) -> list[str]:
        """Log new losses when a report is due; return the lines. `now_s`: monotonic time."""
        if now_s < self._next_s:
            return []
        counters = self._statistics.counters()
        lines = self._news(counters)
        if lines:
            self._next_s = now_s + _REPORT_S
            self._reported = counters
        for line in lines:
            _logger.warning("%s", printable(line))
        return lines

    def _news(self, now: IngestCounters) -> list[str]:
        examples, last_refusal = self._statistics.examples()
        lines = []
        for what, new, old in (
            ("row", now.refused_rows, self._reported.refused_rows),
            ("batch", now.refused_batches, self._reported.refused_batches),
        ):
            for (reason, host), number in sorted(new.items()):
                more = number - old.get((reason, host), 0)
                example = f", the newest: {examples[reason]}" if what == "batch" and reason in examples else ""
                if more:
                    text = count_text(more, what, "batches" if what == "batch" else "")
                    lines.append(f"host {host}: {text} rejected: {reason}{example}")
        for host, number in sorted(now.dropped_rows.items()):
            if more := number - self._reported.dropped_rows.get(host, 0):
                lines.append(f"host {host} has dropped {count_text(more, 'row')} that did not fit its spool")
        if more := now.refused_handshakes - self._reported.refused_handshakes:
            lines.append(f"{count_text(more, 'stream')} refused, the newest: {last_refusal}")
        if more := now.skipped_rows - self._reported.skipped_rows:
            lines.append(
                f"{count_text(more, 'row')} stored but skipped by the live detection, because too many rows waited"
            )
        return lines
