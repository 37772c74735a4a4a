"""Real drivers on a real etcd, and two hosts whose records a test defines."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from megatrain.config.config import Config
from megatrain.contracts.records.host_records import HostPhase, HostRecord, HostStatus, Milestones
from megatrain.contracts.records.incident import Incident
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import RecordType, decode, encode
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.lease_keeper import LeaseKeeper
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange
from megatrain_launcher.driver.driver import Driver, SteadyClock
from megatrain_launcher.driver.policy import Policy
from megatrain_launcher.notify.notifier import notifier_of
from tests.helpers.etcd_server import EtcdServers
from tests.helpers.waiting import wait_until

POLICY = Policy(min_hosts=2, max_hosts=2, num_workers=1, feasible_counts={2: 1})
KEYS = JobKeys("job")
TTL_S = 60
"""A busy machine may delay renewals by seconds: during a test no lease ends unless it is revoked."""
NOW = 1_700_000_000.0


class DriverCandidate:
    """A driver in a thread, with a separate client and lease. `config`: with the receivers to notify; None: no
    receivers."""

    def __init__(
        self,
        etcd: EtcdServers,
        name: str,
        incidents: Path,
        settings: EtcdSettings | None = None,
        config: Config | None = None,
    ) -> None:
        self.name = name
        self.client = EtcdClient(settings or EtcdSettings.of(etcd.urls))
        self.keeper = LeaseKeeper(self.client, ttl_s=TTL_S, period_s=0.5)
        clock = SteadyClock()
        make_notifier = None if config is None else notifier_of(config, self.client, KEYS, clock)
        self.driver = Driver(
            self.client, KEYS, lambda: self.keeper, name, POLICY, leading=threading.Event(), clock=clock,
            incidents_directory=incidents, make_notifier=make_notifier,
        )  # fmt: skip
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.driver.run, args=(self.stop,))
        self.thread.start()

    def die(self) -> None:
        """End without a message to etcd, as a killed process does."""
        self.client.close()
        self.close()

    def close(self) -> None:
        self.stop.set()
        self.thread.join()
        self.keeper.close()
        self.client.close()


class CandidateHosts:
    """Two hosts whose records a test defines."""

    def __init__(self, client: EtcdClient) -> None:
        self.client = client
        self.records = [
            HostRecord(f"host-{n}", f"s-{n}", 1, "127.0.0.1", 1, 1, 1, "", "", "", NOW, is_fit=True) for n in range(2)
        ]
        for record in self.records:
            client.put(KEYS.host(record.host), encode(record))

    def say(self, host: int, phase: HostPhase, number: int, **more: object) -> None:
        record = self.records[host]
        status = replace(HostStatus(record.host, record.session, phase, number), **more)
        self.client.put(KEYS.status(record.host), encode(status))

    def train(self, number: int) -> None:
        for host in range(2):
            milestones = Milestones(NOW, NOW, NOW, NOW)
            self.say(host, HostPhase.RUNNING, number, min_step=10, resumed_step=5, milestones=milestones)

    def read(self, kind: type[RecordType], key: str) -> RecordType | None:
        item = self.client.get(key)
        return None if item is None else decode(kind, item.value, key)

    def wait_for(self, kind: type[RecordType], key: str) -> RecordType:
        wait_until(lambda: self.client.get(key) is not None, key)
        found = self.read(kind, key)
        assert found is not None
        return found

    def incident(self) -> Incident:
        (item,) = self.client.read_all(KeyRange.prefix(KEYS.directory("incidents"))).items
        return decode(Incident, item.value, "incident")
