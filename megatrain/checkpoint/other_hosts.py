"""How a writer of a checkpoint waits for the writers of the other hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatrain.arena.plans import HostPlan
from megatrain.arena.slot_layout import SealedSnapshot
from megatrain.checkpoint.write_marks import DoneMark, WritingMark, done_name, failed_name, read_failed
from megatrain.checkpoint_format.checkpoint_names import COMMIT_NAME
from megatrain.checkpoint_format.commit import Commit
from megatrain.checkpoint_format.location import Location
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.pauses import growing_pauses
from megatrain.formatting import names_text

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


class OtherHosts:
    """The writers of the other hosts, by the marks that they leave in the checkpoint's directory.

    valid_commit: returns COMMIT if it is valid. reason_to_stop_waiting: returns why this writer must not wait any
    longer, "" while it may.
    """

    def __init__(
        self,
        directory: Location,
        snapshot: SealedSnapshot,
        plan: HostPlan,
        valid_commit: Callable[[], Commit | None],
        reason_to_stop_waiting: Callable[[], str],
    ) -> None:
        self._directory = directory
        self._snapshot = snapshot
        self._plan = plan
        self._valid_commit = valid_commit
        self._reason_to_stop_waiting = reason_to_stop_waiting

    def await_done(self) -> list[DoneMark]:
        """Return the marks of all hosts, once all have reported done. Raises: CheckpointError."""
        marks: dict[int, DoneMark] = {}
        hosts = range(self._plan.num_hosts)

        def is_complete() -> bool:
            names = self._names()
            if COMMIT_NAME in names and self._valid_commit() is not None:
                raise CheckpointError(f"{self._directory}: committed by another round, so this writer must stop")
            for index in hosts:
                if index not in marks and done_name(self._snapshot.round, index) in names:
                    mark = DoneMark.read(self._directory, self._snapshot, index)
                    if mark is not None:
                        marks[index] = mark
            return len(marks) == len(hosts)

        self._wait(is_complete, lambda: f"the data files of {_hosts_text([i for i in hosts if i not in marks])}")
        return [marks[index] for index in hosts]

    def await_commit(self) -> None:
        """Return when the checkpoint is committed. Raises: CheckpointError."""

        def is_committed() -> bool:
            return COMMIT_NAME in self._names() and self._valid_commit() is not None

        self._wait(is_committed, lambda: "COMMIT, which the host of rank 0 writes")

    def _names(self) -> set[str]:
        """Return the names of the checkpoint's files. Raises: CheckpointError when another host has given it up."""
        names = {entry.name for entry in self._directory.entries()}
        for index in range(self._plan.num_hosts):
            if index != self._plan.host_index and failed_name(self._snapshot.round, index) in names:
                problem = read_failed(self._directory, self._snapshot, index)
                if problem is not None:
                    raise CheckpointError(f"{self._directory}: host {index} gave up: {problem}")
        return names

    def _wait(self, is_met: Callable[[], bool], awaited: Callable[[], str]) -> None:
        deadline = time.monotonic() + self._plan.commit_timeout_s
        for pause_s in growing_pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            if is_met():
                return
            newer = WritingMark.read(self._directory)
            if newer is not None and newer.round > self._snapshot.round:
                raise CheckpointError(
                    f"{self._directory}: round {newer.round} is writing this checkpoint; round {self._snapshot.round}"
                    f" no longer waits for {awaited()}"
                )
            reason = self._reason_to_stop_waiting()
            if reason:
                raise CheckpointError(f"{self._directory}: {reason}; no longer waiting for {awaited()}")
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"{self._directory}: waited {self._plan.commit_timeout_s:g} s for {awaited()}; see the writer's log"
                    " there, or raise runtime.checkpoint_timeout_s"
                )
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))


def _hosts_text(indexes: Sequence[int]) -> str:
    return f"host{'s' if len(indexes) != 1 else ''} {names_text([str(index) for index in indexes])}"
