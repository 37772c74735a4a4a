"""Invariants of the history of a job's keys in etcd: of a simulated job, or of a real one with faults."""

from __future__ import annotations

from contextlib import suppress

from megatrain.contracts.errors import CoordinationError
from megatrain.contracts.records.host_records import HostPhase, HostStatus
from megatrain.contracts.records.job_keys import JobKeys
from megatrain.contracts.records.record import decode
from megatrain.contracts.records.rounds import Round
from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.watch import Watch
from megatrain_job.coordination.watch_event import Change, ChangeKind, Changes
from megatrain_job.coordination.wire import KeyRange, KeyValue

_READ_S = 30.0
_DRIVERS_OWN = ("rounds", "halts", "deadlines", "commands", "incidents", "outcomes", "end", "report")
_TRAINING = (HostPhase.STARTING, HostPhase.RUNNING)


class JobHistory:
    """Takes the changes of a job in their order; raises AssertionError at the first forbidden one."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._rounds: dict[int, Round] = {}
        self._written: dict[int, bytes] = {}
        self._halted: set[int] = set()
        self._candidates: dict[str, KeyValue] = {}
        self.fenced: set[str] = set()
        """Sessions that no later round may name."""
        self.cordoned: set[str] = set()

    @property
    def num_rounds(self) -> int:
        return len(self._written)

    def take(self, changes: Changes) -> None:
        """Add the changes of one transaction."""
        for change in changes.changes:
            parts = self._keys.parts(change.item.key.decode())
            if change.kind is ChangeKind.PUT:
                with suppress(CoordinationError):  # An unreadable record has no effect.
                    self._put(parts, change.item)
            else:
                self._delete(parts)

    def check_writer(self, changes: Changes) -> None:
        """Check that keys that only the driver writes came with a new leadership revision of the leader. Call it before
        `take`."""
        parts = [self._keys.parts(change.item.key.decode()) for change in changes.changes]
        puts = [part[0] for part, change in zip(parts, changes.changes, strict=True) if change.kind is ChangeKind.PUT]
        if any(kind in _DRIVERS_OWN for kind in puts):
            leader = min(self._candidates.values(), key=lambda item: item.create_revision, default=None)
            candidacies = [change.item for change in changes.changes if self._is_candidacy(change)]
            assert leader is not None, f"revision {changes.revision}: {puts} were written while there was no leader"
            assert [candidacy.key for candidacy in candidacies] == [leader.key], (
                f"revision {changes.revision}: {puts} without a new leadership revision"
            )

    def _is_candidacy(self, change: Change) -> bool:
        return change.kind is ChangeKind.PUT and self._keys.parts(change.item.key.decode())[0] == "driver"

    def _put(self, parts: tuple[str, ...], item: KeyValue) -> None:
        key = item.key.decode()
        match parts:
            case ("driver", _):
                self._candidates[key] = item
            case ("cordons", name):
                self.cordoned.add(name)
            case ("halts", number):
                self._halted.add(int(number))
            case ("rounds", number):
                round_ = decode(Round, item.value, key)
                assert self._written.setdefault(int(number), item.value) == item.value, "a round was changed"
                self._check_round(round_)
                self._rounds[round_.number] = round_
                self.fenced.update(round_.fenced)
            case ("status", _):
                self._check_status(decode(HostStatus, item.value, key))

    def _delete(self, parts: tuple[str, ...]) -> None:
        match parts:
            case ("driver", name):
                self._candidates.pop(f"{self._keys.election}/{name}", None)
            case ("cordons", name):
                self.cordoned.discard(name)

    def _check_round(self, round_: Round) -> None:
        names = [part.host for part in round_.hosts]
        ranks = [part.first_rank + local for part in round_.hosts for local in range(part.num_workers)]
        assert len(set(names)) == len(names), "a host twice"
        assert ranks == list(range(round_.world_size)), "a rank twice, or missing"
        assert not {part.session for part in round_.hosts} & (self.fenced | set(round_.fenced)), "a fenced session"
        assert not set(names) & self.cordoned, "a cordoned host"
        older = {number for number in self._rounds if number < round_.number}
        assert older <= self._halted, "an older round was not halted"

    def _check_status(self, status: HostStatus) -> None:
        newest = max(self._rounds, default=0)
        is_left_behind = 0 < status.round < newest and status.phase in _TRAINING and status.session not in self.fenced
        assert not is_left_behind, f"{status.host} is {status.phase} in round {status.round}, and {newest} has begun"


def check_history(client: EtcdClient, keys: JobKeys) -> int:
    """Read and check all revisions of a job's keys; return the number of its rounds."""
    history = JobHistory(keys)
    newest = client.read_all(KeyRange.prefix(keys.prefix)).revision
    with Watch(client, KeyRange.prefix(keys.prefix), start_revision=1) as watch:
        revision = 0
        while revision < newest:
            event = watch.next(_READ_S)
            if event is None:
                break  # The newest change of all was to other keys.
            assert isinstance(event, Changes), "etcd has compacted the beginning"
            history.check_writer(event)
            history.take(event)
            revision = event.revision
    return history.num_rounds
