"""An etcd of dicts: keys with revisions, transactions, and the log of all changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatrain.contracts.records.job_keys import JobKeys
from megatrain_job.coordination.watch_event import Change, ChangeKind, Changes, Snapshot
from megatrain_job.coordination.wire import Compare, CompareTarget, Delete, KeyValue, Operation, Put, Relation, as_bytes

KEYS = JobKeys("sim")


class SimulatedEtcd:
    """Keys with revisions, transactions, and the log of all changes."""

    def __init__(self) -> None:
        self.revision = 1
        self.items: dict[str, KeyValue] = {}
        self.log: list[Changes] = []

    def put(self, key: str, value: bytes) -> None:
        assert self.txn((), (Put(key, value),))

    def delete(self, keys: Iterable[str]) -> None:
        present = [key for key in keys if key in self.items]
        if present:
            self._apply([(key, None, 0) for key in present])

    def txn(self, conditions: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        """Apply all operations if all conditions hold; return whether they did."""
        if not all(self._is_met(condition) for condition in conditions):
            return False
        changes: list[tuple[str, bytes | None, int]] = []
        for operation in operations:
            if isinstance(operation, Put):
                key = as_bytes(operation.key).decode()
                lease_id = self.items[key].lease_id if operation.is_lease_kept else operation.lease_id
                changes.append((key, as_bytes(operation.value), lease_id))
            elif isinstance(operation, Delete) and operation.keys.start.decode() in self.items:
                changes.append((operation.keys.start.decode(), None, 0))
        assert len({key for key, _, _ in changes}) == len(changes), "etcd refuses a key that is put twice"
        self._apply(changes)
        return True

    def snapshot(self) -> Snapshot:
        return Snapshot(self.revision, tuple(self.items.values()), "asked")

    def _apply(self, changes: Sequence[tuple[str, bytes | None, int]]) -> None:
        self.revision += 1
        reported: list[Change] = []
        for key, value, lease_id in changes:
            before = self.items.pop(key, None)
            if value is None:
                reported.append(Change(ChangeKind.DELETE, KeyValue(key.encode(), b"", 0, self.revision, 0)))
                continue
            created = self.revision if before is None else before.create_revision
            self.items[key] = KeyValue(key.encode(), value, created, self.revision, lease_id)
            reported.append(Change(ChangeKind.PUT, self.items[key]))
        self.log.append(Changes(self.revision, tuple(reported)))

    def _is_met(self, condition: Compare) -> bool:
        item = self.items.get(condition.key.decode())
        revisions = {CompareTarget.CREATE_REVISION: "create_revision", CompareTarget.MOD_REVISION: "mod_revision"}
        found = 0 if item is None else getattr(item, revisions[condition.target])
        assert isinstance(condition.operand, int)
        return found == condition.operand if condition.relation is Relation.EQUAL else found > condition.operand
