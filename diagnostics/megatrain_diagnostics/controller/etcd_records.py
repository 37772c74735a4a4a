"""What the controller writes to etcd: verdicts, and the request for all spans when a suspicion begins."""

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
"""Time between two bursts: full spans of every step are ten times the usual traffic."""


class VerdictLog:
    """Verdicts in etcd: created, never changed, never withdrawn.

    Raises from its methods: CoordinationError while etcd is away.
    """

    def __init__(self, client: EtcdClient, keys: JobKeys) -> None:
        self._client = client
        self._keys = keys

    def written(self, round_number: int) -> WrittenVerdicts:
        """Return the verdicts written so far, perhaps by an earlier daemon. Other content is skipped."""
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
        """Create a verdict. An existing verdict of this id was written by an earlier try."""
        key = self._keys.verdict(verdict.verdict_id)
        self._client.txn([Compare.is_absent(key)], [Put(key, encode(verdict))], is_repeatable=True)


class FullSpans:
    """Requests all spans of the ranks for a limited time; the request includes its end.

    Writes DiagSettings, changing only that one field.
    """

    def __init__(self, client: EtcdClient, keys: JobKeys, session: str, sample_period: Callable[[], int]) -> None:
        self._client = client
        self._key = keys.diag_settings
        self._by = f"daemon {session}"
        self._sample_period = sample_period
        self._next_s = float("-inf")

    def ask(self, now_s: float, steady_s: float, reason: str) -> bool:
        """Return whether a burst begins: not soon after another one, and not where a person has switched spans off.

        `now_s` is the unix time, `steady_s` of a monotonic clock.
        Raises: CoordinationError while etcd is away; ask again then.
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
            return False  # another writer has just changed it
        self._next_s = steady_s + PAUSE_S
        _logger.info("all spans are recorded for %g s: %s", BURST_S, reason)
        return True
