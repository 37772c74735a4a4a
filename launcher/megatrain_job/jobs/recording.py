"""The setting for the recording of a job's ranks: a key in etcd that people can change and each executor follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.diag_records import SAMPLE_PERIOD, DiagSettings
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import JobRecord
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.wire import Compare, Put

_NUM_TRIES = 10


def configured_period(client: EtcdClient, keys: JobKeys) -> int:
    """Return the sample period of the job's configuration. Raises: CoordinationError if there is no such job."""
    record = client.get(keys.record)
    if record is None:
        raise CoordinationError(f"job {keys.job!r}: etcd has no job of this name")
    configured = decode(JobRecord, record.value, keys.record).config.get("diagnostics.sample_period", "")
    return int(configured) if configured.isascii() and configured.isdigit() and len(configured) <= 10 else SAMPLE_PERIOD


def read_recording(client: EtcdClient, keys: JobKeys, period: int) -> DiagSettings:
    """Return the current setting; if it was never changed, recording is on with `period`.

    Raises: CoordinationError if it cannot be read.
    """
    key = keys.diag_settings
    item = client.get(key)
    return DiagSettings(sample_period=period) if item is None else decode(DiagSettings, item.value, key)


def switched(before: DiagSettings, *, is_on: bool, period: int) -> DiagSettings:
    """Return the settings after recording is switched on or off; switching on restores the configured period."""
    return DiagSettings(is_on=True, sample_period=period) if is_on else replace(before, is_on=False)


def change_recording(
    client: EtcdClient, keys: JobKeys, period: int, changed: Callable[[DiagSettings], DiagSettings]
) -> DiagSettings:
    """Write `changed(current setting)`; repeat if another client, such as the daemon, changed it meanwhile.

    Raises: CoordinationError.
    """
    key = keys.diag_settings
    for _ in range(_NUM_TRIES):
        item = client.get(key)
        try:
            before = DiagSettings(sample_period=period) if item is None else decode(DiagSettings, item.value, key)
        except CoordinationError:  # an unreadable value is overwritten
            before = DiagSettings(sample_period=period)
        settings = changed(before)
        unchanged = Compare.is_absent(key) if item is None else Compare.mod_revision(key, item.mod_revision)
        if client.txn([unchanged], [Put(key, encode(settings))]).succeeded:
            return settings
    raise CoordinationError(f"{key}: other clients keep changing it; try again")
