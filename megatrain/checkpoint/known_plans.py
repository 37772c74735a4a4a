"""The host plans that a writer has read, and the BRANCH contents of their branches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from megatrain.arena.directory import Arena
from megatrain.arena.plans import HostPlan
from megatrain.checkpoint_format.branches import Branch, read_branch
from megatrain.checkpoint_format.location import Location
from megatrain.contracts.errors import CheckpointError, MissingFileError

_NUM_OLDER = 2
"""Slots may hold snapshots that the last one or two older rounds left pending."""


class KnownPlans:
    """The newest plan in host.json, and the plans of the rounds before it."""

    def __init__(self, arena: Arena, open_checkpoints: Callable[[str], Location]) -> None:
        self._arena = arena
        self._open_checkpoints = open_checkpoints
        self.by_round: dict[int, HostPlan] = {}
        self.problem = ""
        """Why host.json cannot be used; empty if it can, or does not exist."""
        self._branches: dict[tuple[str, str], Branch] = {}
        """By location and name of the branch. A user may remove the files while the job runs."""

    @property
    def newest(self) -> HostPlan | None:
        """The plan of the newest round, None before the first plan."""
        return self.by_round[max(self.by_round)] if self.by_round else None

    def read(self) -> str:
        """Read host.json. Return why it cannot be used, unless the last call found the same; else an empty text."""
        before, self.problem = self.problem, ""
        try:
            plan = HostPlan.read(self._arena.host_plan)
        except MissingFileError:
            return ""
        except CheckpointError as error:
            self.problem = str(error)
            return self.problem if self.problem != before else ""
        if plan.round not in self.by_round:
            self._remember_branch(plan)
        older = sorted(number for number in self.by_round if number < plan.round)[-_NUM_OLDER:]
        self.by_round = {**{number: self.by_round[number] for number in older}, plan.round: plan}
        return ""

    def branch(self, plan: HostPlan) -> Branch | None:
        """Return the content of the BRANCH file when this plan was first read, None when it is unknown."""
        return self._branches.get((plan.checkpoints, plan.branch))

    def _remember_branch(self, plan: HostPlan) -> None:
        if plan.is_coordinator:
            with suppress(CheckpointError):  # storage is unavailable: each checkpoint reads the branch again
                found = read_branch(self._open_checkpoints(plan.checkpoints), plan.branch)
                self._branches[plan.checkpoints, plan.branch] = found
