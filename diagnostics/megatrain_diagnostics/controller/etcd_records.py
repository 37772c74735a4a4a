"""The controller's records in etcd: verdicts, and requests to record all spans when there is a suspicion."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import DiagSettings
from megatrain.contracts.records.host_verdict import HostVerdict
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.controller.verdict_rules import WrittenVerdicts, key_of
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.wire import Compare, KeyRange, Put

_logger = logging.getLogger(__name__)
BURST_S = 30.0
PAUSE_S = 600.0
"""Time between two bursts, because all spans of every step cause ten times the normal traffic."""


class VerdictLog:
    """Verdicts in etcd, which are created, but never changed or deleted.

    All methods raise CoordinationError if etcd is unavailable.
    """

    def __init__(self, client: EtcdClient, keys: JobKeys) -> None:
        self._client = client
        self._keys = keys

    def written(self, round_number: int) -> WrittenVerdicts:
        """Return the written verdicts, including those of earlier daemons; unreadable records are skipped."""
        found = WrittenVerdicts(round_number)
        for item in self._client.read_all(KeyRange.prefix(self._keys.directory("verdicts"))).items:
            place = item.key.decode("utf-8", errors="replace")
            try:
                verdict = decode(HostVerdict, item.value, place)
            except CoordinationError as error:
                _logger.warning("a verdict is skipped: %s", error)
                continue
            key = key_of(verdict) if verdict.round == round_number else ""
            found = found.with_verdict(key, verdict)
        return found

    def write(self, verdict: HostVerdict) -> None:
        """Create a verdict. If the id exists, an earlier try has written it, and nothing is changed."""
        key = self._keys.verdict(verdict.verdict_id)
        self._client.txn([Compare.is_absent(key)], [Put(key, encode(verdict))], is_repeatable=True)


class FullSpans:
    """Requests all spans of the ranks for a limited time, by writing the end of that time to DiagSettings."""

    def __init__(self, client: EtcdClient, keys: JobKeys, session: str, sample_period: Callable[[], int]) -> None:
        self._client = client
        self._key = keys.diag_settings
        self._by = f"daemon {session}"
        self._sample_period = sample_period
        self._next_s = float("-inf")

    def ask(self, now_s: float, steady_s: float, reason: str) -> bool:
        """Request a burst, and return whether it begins.

        No burst begins within ten minutes after another one, or if spans are switched off or all recorded anyway; then
        the settings are not read again for ten minutes.
        `now_s`: unix time; `steady_s`: monotonic time.
        Raises: CoordinationError if etcd is unavailable, or the settings in it are unreadable.
        """
        if steady_s < self._next_s:
            return False
        item = self._client.get(self._key)
        settings = (
            DiagSettings(sample_period=self._sample_period())
            if item is None
            else decode(DiagSettings, item.value, self._key)
        )
        if not settings.is_on or settings.full_until_unix_s >= now_s + BURST_S or settings.sample_period == 1:
            self._next_s = steady_s + PAUSE_S
            return False
        wanted = replace(settings, full_until_unix_s=now_s + BURST_S, by=self._by, reason=reason, at_unix_s=now_s)
        revision = 0 if item is None else item.mod_revision
        response = self._client.txn([Compare.mod_revision(self._key, revision)], [Put(self._key, encode(wanted))])
        if not response.succeeded:
            return False  # another writer has just changed the settings
        self._next_s = steady_s + PAUSE_S
        _logger.info("all spans are recorded for %g s: %s", BURST_S, reason)
        return True
