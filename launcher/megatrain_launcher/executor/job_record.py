"""Claims a job's name: the first host writes the job's record, and the settings of the other hosts must match it.

A name is free if no job has it, or if its job has ended (or was abandoned) and none of its hosts is registered any
more. Then the new launch replaces the record and deletes the old end, requests and commands, in one transaction. Rounds
are kept and their numbers continue, so that files and keys of old rounds cannot be confused with those of new rounds.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatrain.config.serialize import config_values
from megatrain.contracts.errors import ConfigError, CoordinationError
from megatrain.contracts.records.host_records import HostRecord
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode, encode
from megatrain.contracts.records.rounds import JobEnd, JobRecord, LostLaunch
from megatrain.formatting import count_text, names_text
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.wire import Compare, Delete, KeyRange, KeyValue, Operation, Put, Range
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.liveness import Liveness, ask

_logger = logging.getLogger(__name__)
_MAX_SHOWN_KEYS = 8
_MAX_HOSTS_READ = 64
"""The most host records to read: a few suffice, and a thousand hosts may read at once."""
_MAX_ASKED = 4
_POLL_S = 0.25
_ABANDONED_S = 2.0
"""A job with a record, but without an end and hosts, counts as abandoned after this time."""


@dataclass(frozen=True, slots=True)
class JobView:
    """The keys of a job in etcd at one revision."""

    record: JobRecord | None
    record_revision: int
    end: JobEnd | None
    end_revision: int
    hosts: tuple[HostRecord, ...]
    has_begun: bool = False
    """Whether a round was written after the record."""


def record_of(settings: ExecutorSettings) -> JobRecord:
    """Return the record that this host writes if it is the first host."""
    config = settings.config
    return JobRecord(
        job=config.job.name,
        launch_id=settings.launch_id,
        config_hash=settings.config_hash,
        config=config_values(config),
        min_hosts=settings.min_hosts,
        max_hosts=settings.max_hosts,
        num_workers=settings.num_workers,
        run_directory=str(settings.run_directory.root.absolute()),
        first_host=settings.host,
        created_unix_s=time.time(),
    )


FindLostLaunch = Callable[[JobRecord], LostLaunch]
"""Returns the traces of a launch that ended without an end record."""


def _as_recorded(record: JobRecord) -> LostLaunch:
    return LostLaunch(record.launch_id, record.first_host, record.created_unix_s)


def claim_job(
    client: EtcdClient,
    keys: JobKeys,
    mine: JobRecord,
    patience_s: float,
    find_lost_launch: FindLostLaunch = _as_recorded,
) -> JobRecord:
    """Claim the name for this launch, and return the job's record.

    `patience_s`: how many seconds to wait for the hosts of an ended or unresponsive launch to leave. The caller must
    register its host at once, because a record without hosts soon counts as abandoned.
    Raises: ConfigError with hosts and keys if the settings differ or another launch has the name; CoordinationError.
    """
    began = time.monotonic()
    while True:
        view = read_job(client, keys)
        waited_s = time.monotonic() - began
        if view.record is None or (view.end is not None and not view.hosts):
            # read the record again after this: another host may have written it first
            _write_record(client, keys, view, mine, find_lost_launch)
        elif view.end is not None and mine.launch_id and view.record.launch_id == mine.launch_id:
            return view.record  # this launch has already ended, so this host leaves like the others
        elif (
            view.end is None
            and _is_same_launch(view.record, mine)
            and not (waited_s <= patience_s and _has_no_live_host(view, mine))
        ):
            problems = _differences(view.record, mine)
            if not problems:
                return view.record
            if view.hosts or waited_s > _ABANDONED_S:
                raise ConfigError(problems)
            time.sleep(_POLL_S)
        elif view.hosts and (waited_s > patience_s or (view.end is None and Liveness.ALIVE in _probe_some(view.hosts))):
            raise ConfigError([_another_launch(view.record, view, mine)])
        elif view.end is None and not view.hosts and waited_s > _ABANDONED_S:
            _write_record(client, keys, view, mine, find_lost_launch)
        else:
            # hosts of an ended launch are leaving, leases of a killed launch are expiring, or the first host of another
            # launch is about to register
            time.sleep(_POLL_S)


def read_job(client: EtcdClient, keys: JobKeys) -> JobView:
    """Read the job's keys at one revision, with at most _MAX_HOSTS_READ hosts.

    Raises: CoordinationError; also when a record cannot be read, except a host record without a lease.
    """
    hosts_range = Range(KeyRange.prefix(keys.directory("hosts")), limit=_MAX_HOSTS_READ, is_newest_first=True)
    newest_round = Range(KeyRange.prefix(keys.directory("rounds")), limit=1, is_newest_first=True, has_values=False)
    ranges = [Range(KeyRange.key(keys.record)), Range(KeyRange.key(keys.end)), hosts_range, newest_round]
    records, ends, hosts, rounds = (response.items for response in client.read_together(ranges))
    record, end = (_only(items) for items in (records, ends))
    return JobView(
        record=None if record is None else decode(JobRecord, record.value, keys.record),
        record_revision=0 if record is None else record.mod_revision,
        end=None if end is None else decode(JobEnd, end.value, keys.end),
        end_revision=0 if end is None else end.mod_revision,
        hosts=tuple(found for item in hosts if (found := _host_of(item)) is not None),
        has_begun=record is not None and any(item.create_revision > record.mod_revision for item in rounds),
    )


def _host_of(item: KeyValue) -> HostRecord | None:
    """Return a registered host; None for an unreadable key without a lease, which no executor has written."""
    key = item.key.decode(errors="replace")
    try:
        return decode(HostRecord, item.value, key)
    except CoordinationError as error:
        if item.lease_id:
            raise
        _logger.warning("a key below hosts/ is not a host's record, and is skipped: %s", error)
        return None


def _only(items: tuple[KeyValue, ...]) -> KeyValue | None:
    return items[0] if items else None


def _probe_some(hosts: Sequence[HostRecord]) -> Iterator[Liveness]:
    """Probe a few of a launch's registered hosts, one after another; one live host proves that the launch runs."""
    return (ask(host.address, host.liveness_port, host.session)[0] for host in hosts[:_MAX_ASKED])


def _is_same_launch(record: JobRecord, mine: JobRecord) -> bool:
    """Return whether this host may belong to the launch that wrote the record."""
    return not mine.launch_id or record.launch_id == mine.launch_id


def _has_no_live_host(view: JobView, mine: JobRecord) -> bool:
    """Return whether a new launch begins: this host has no launch id, and the recorded launch had a round and is dead.

    It is dead if each of its probed hosts is dead. Without this check, this host would join the recorded launch, and
    the loss of that launch would not be reported.
    """
    if mine.launch_id or not view.has_begun:
        return False
    return all(liveness is Liveness.DEAD for liveness in _probe_some(view.hosts))


def _write_record(
    client: EtcdClient, keys: JobKeys, view: JobView, mine: JobRecord, find_lost_launch: FindLostLaunch
) -> None:
    """Write this launch's record in place of `view.record`, unless another host has changed it.

    The new record contains the traces of an earlier launch without an end.
    """
    own = mine if mine.launch_id else replace(mine, launch_id=secrets.token_hex(8))
    if view.record is not None and view.end is None and view.has_begun:
        own = replace(own, lost_launch=find_lost_launch(view.record))
    conditions = [
        Compare.mod_revision(keys.record, view.record_revision),
        Compare.mod_revision(keys.end, view.end_revision),
    ]
    then: list[Operation] = [Put(keys.record, encode(own)), Delete(KeyRange.key(keys.end))]
    then += [Delete(KeyRange.prefix(keys.directory(name))) for name in ("requests", "commands")]
    client.txn(conditions, then, is_repeatable=True)


def _differences(record: JobRecord, mine: JobRecord) -> list[str]:
    """Return how this host's settings differ from the first host's."""
    first, here = record.first_host, mine.first_host
    problems = [
        f"{key}: {here} has {_shown(mine.config, key)}, but {first}, the first host of job {record.job!r}, has "
        f"{_shown(record.config, key)}"
        for key in sorted(record.config.keys() | mine.config.keys())
        if record.config.get(key) != mine.config.get(key)
    ]
    if len(problems) > _MAX_SHOWN_KEYS:
        problems[_MAX_SHOWN_KEYS:] = [f"... and {count_text(len(problems) - _MAX_SHOWN_KEYS, 'more key')}"]
    for name, flag in (("num_workers", "--nproc-per-node"), ("min_hosts", "--nnodes"), ("max_hosts", "--nnodes")):
        found, expected = getattr(mine, name), getattr(record, name)
        if found != expected:
            problems.append(f"{flag}: {here} was started with {name}={found}, {first} with {expected}")
    if not problems and record.run_directory and mine.run_directory != record.run_directory:
        problems.append(
            f"job.run_directory: {here} writes to {mine.run_directory}, {first} to {record.run_directory}: a relative "
            "path starts at each host's working directory"
        )
    if not record.config and record.config_hash != mine.config_hash:
        problems.append(f"config: {here} has hash {mine.config_hash[:12]}, {first} has {record.config_hash[:12]}")
    hint = "start all hosts with one configuration, or give this job another job.name"
    return [f"{problem}; {hint}" for problem in problems]


def _shown(config: Mapping[str, str], key: str) -> str:
    return config.get(key, "no such key")


def _another_launch(record: JobRecord, view: JobView, mine: JobRecord) -> str:
    names = names_text(sorted(host.host for host in view.hosts), 4)
    state = "has ended, but its hosts have not left" if view.end is not None else "is running"
    hint = "end its launchers" if view.end is not None else "stop it with `megatrain job stop`"
    own = mine.launch_id or "none"
    return (
        f"job.name={mine.job!r}: {mine.first_host} cannot launch it: another launch of this name {state} (begun by "
        f"{record.first_host}, launch id {record.launch_id}, own launch id {own}; hosts {names}; key of its record: "
        f"{JobKeys(record.job).record}); {hint}, or give the new launch another job.name"
    )


def leaving_error(host: str, error: CoordinationError) -> CoordinationError:
    """Return the same error with the host's name in front."""
    return type(error)(
        f"host {host}: {error}", endpoints=error.endpoints, key=error.key, may_have_applied=error.may_have_applied
    )
