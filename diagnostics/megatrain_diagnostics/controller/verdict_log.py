"""Verdicts in etcd: created, never changed, never withdrawn."""

from __future__ import annotations

import logging

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_verdict import HostVerdict
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain_diagnostics.controller.verdict_rules import WrittenVerdicts, key_of
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.wire import Compare, KeyRange, Put

_logger = logging.getLogger(__name__)


class VerdictLog:
    """Raises from its methods: CoordinationError while etcd is away."""

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
