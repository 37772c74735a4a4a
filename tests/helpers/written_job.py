"""An invented job in a real etcd, as its hosts and its driver would write it."""

from __future__ import annotations

from typing import Any

from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import encode
from megatrain_job.coordination.client import EtcdClient
from tests.helpers.launched_job import make_snapshot


def fill(client: EtcdClient, keys: JobKeys, *, has_driver: bool = True, **changes: Any) -> None:
    """Write the job of `make_snapshot(**changes)`."""
    snapshot = make_snapshot(**changes)
    assert snapshot.record is not None
    client.put(keys.record, encode(snapshot.record))
    for host, record in snapshot.hosts.items():
        client.put(keys.host(host), encode(record))
    for host, status in snapshot.statuses.items():
        client.put(keys.status(host), encode(status))
    for number, one in snapshot.rounds.items():
        client.put(keys.round(number), encode(one))
    for number, halt in snapshot.halts.items():
        client.put(keys.halt(number), encode(halt))
    for incident in snapshot.incidents:
        client.put(keys.incident(incident.incident_id), encode(incident))
    if snapshot.end is not None:
        client.put(keys.end, encode(snapshot.end))
    if has_driver:
        make_driver(client, keys, "host-1")


def make_driver(client: EtcdClient, keys: JobKeys, host: str, name: str = "1") -> None:
    """Write the key of a candidate for the driver; an existing key of this name stays the oldest."""
    client.put(f"{keys.election}/{name}", host, lease_id=client.grant_lease(600).lease_id)
