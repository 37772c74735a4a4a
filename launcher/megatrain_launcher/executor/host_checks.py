"""Runs the health checks of an executor's host, alone and with a partner host."""

from __future__ import annotations

import time
from dataclasses import dataclass

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_records import CheckOutcome, CheckReport, CheckResult, HostRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import HostCommand
from megatrain_job.coordination.client import EtcdClient
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.health.checks import run_checks
from megatrain_launcher.health.child import ProbeRunner, run_probe
from megatrain_launcher.health.context import context_of
from megatrain_launcher.health.pair_test import NAME, pair_task, run_pair


@dataclass(frozen=True, slots=True)
class HostChecks:
    """Implements `check_queue.HealthChecks`."""

    settings: ExecutorSettings
    client: EtcdClient
    keys: JobKeys
    probe: ProbeRunner = run_probe

    def check(self, session: str, is_training: bool) -> CheckReport:
        settings = self.settings
        context = context_of(
            settings.config,
            host=settings.host,
            session=session,
            run_directory=settings.run_directory.root,
            num_workers=settings.num_workers,
            etcd=settings.etcd,
            is_training=is_training,
            places=settings.places,
        )
        return run_checks(context)

    def check_pair(self, session: str, command: HostCommand) -> CheckReport:
        settings, partner = self.settings, command.partners.get(self.settings.host, "")
        at_unix_s = time.time()
        if not partner:
            result = CheckResult(NAME, CheckOutcome.SKIPPED, "this host has no partner in this turn", 0.0)
            return CheckReport(settings.host, session, at_unix_s, (result,))
        try:
            own, other = self._record(settings.host), self._record(partner)
        except CoordinationError as error:
            failure = CheckResult(NAME, CheckOutcome.WARNING, f"all-reduce with {partner}: {error}", 0.0)
            return CheckReport(settings.host, session, at_unix_s, (failure,))
        runtime, recovery = settings.config.runtime, settings.config.recovery
        task = pair_task(
            own,
            other,
            command.number,
            device=runtime.device,
            network_interface=runtime.network_interface,
            timeout_s=recovery.pair_timeout_s,
        )
        return CheckReport(settings.host, session, at_unix_s, (run_pair(task, settings.environment, self.probe),))

    def _record(self, host: str) -> HostRecord:
        key = self.keys.host(host)
        item = self.client.get(key)
        if item is None:
            raise CoordinationError(f"{key}: host {host} is not registered", key=key)
        return decode(HostRecord, item.value, key)
