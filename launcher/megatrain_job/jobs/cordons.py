"""Cordons that people set and remove: written to etcd directly, even if no job runs. The driver reads them."""

from __future__ import annotations

import time

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import Cordon
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.wire import Compare, KeyRange, Put, Range


def cordon_host(client: EtcdClient, keys: JobKeys, host: str, *, reason: str, by: str) -> tuple[Cordon, bool]:
    """Exclude a host from all later rounds. Return the cordon in force, and whether this call created it.

    Raises: CoordinationError.
    """
    key = keys.cordon(host)
    new = Cordon(host, reason or "no reason given", by, time.time())
    response = client.txn(
        [Compare.is_absent(key)], [Put(key, encode(new))], [Range(KeyRange.key(key))], is_repeatable=True
    )
    if response.succeeded:
        return new, True
    there = decode(Cordon, response.range_response(0).first().value, key)
    return there, there == new  # a repeated transaction finds the cordon of its first try


def uncordon_host(client: EtcdClient, keys: JobKeys, host: str) -> bool:
    """Let rounds use a host again. Return whether it was cordoned. Raises: CoordinationError."""
    key = keys.cordon(host)
    before = client.get(key)
    num_deleted = client.delete(key).num_deleted
    return before is not None or num_deleted > 0
