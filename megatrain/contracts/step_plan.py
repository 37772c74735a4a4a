"""Which replica computes which samples of a step, and in which slots of its pipeline. Pure functions: no I/O, no clock.

The samples of a step are dealt to the d replicas of the model (Layout.sample_share): micro-batch k goes to replica
k mod d. So the samples of a step, and those of each micro-batch, do not depend on d, and d need not divide the number
of micro-batches: the first replicas then have one more than the others. A slot is one pass through a pipeline. A
replica has a slot for each of its micro-batches, and empty slots after them if its pipeline needs more. The samples of
a step may be dealt in another order than that of their numbers (data/balance.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.contracts.sample_ranges import SampleRanges, position_after
from megatrain.formatting import count_text

NO_SAMPLE = -1
"""The number of a sample in an empty slot."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """How the micro-batches of a step are dealt to replicas, and how many slots each replica has.

    least_slots: the fewest slots that the pipeline schedule allows. has_equal_slots: all replicas have the same number
    of slots, because they exchange something in each slot.
    """

    num_microbatches: int
    num_replicas: int
    least_slots: int = 1
    has_equal_slots: bool = False

    def num_own(self, replica: int) -> int:
        """Return the number of micro-batches of a replica."""
        return -(-(self.num_microbatches - replica) // self.num_replicas)

    def num_slots(self, replica: int) -> int:
        """Return the number of slots of a replica, with its empty slots."""
        return max(self.num_own(0 if self.has_equal_slots else replica), self.least_slots)

    @property
    def max_slots(self) -> int:
        """The largest number of slots of a replica, which determines how long the step takes."""
        return self.num_slots(0)

    @property
    def has_empty_slots(self) -> bool:
        """Whether a replica computes more slots than it has micro-batches."""
        last = self.num_replicas - 1
        return self.num_slots(last) > self.num_own(last)

    @property
    def idle_share(self) -> float:
        """The share of a step in which replicas wait or compute empty slots, without the bubble of the pipeline."""
        return 1.0 - self.num_microbatches / (self.num_replicas * self.max_slots)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The samples of one step, from number `cursor` on without the `skipped` ones, and the replica that computes each.

    order: the order in which the samples are dealt, as their indices in the step from 0; empty: by number.
    Raises: ValueError when the dealt micro-batches do not hold `global_batch_size` samples, or when `order` does not
    contain each of their indices once.
    """

    cursor: int
    global_batch_size: int
    micro_batch_size: int
    dealing: Dealing
    skipped: SampleRanges = ()
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        found = self.dealing.num_microbatches * self.micro_batch_size
        if found != self.global_batch_size:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not {self.dealing.num_microbatches} micro-batches of "
                f"micro_batch_size={self.micro_batch_size}; use a multiple of micro_batch_size"
            )
        if self.order and sorted(self.order) != list(range(self.global_batch_size)):
            raise ValueError(
                f"order has {len(self.order)} indices, {len(set(self.order))} of them distinct; it must have each of "
                f"the {self.global_batch_size} samples of the step once"
            )

    @property
    def samples(self) -> list[int]:
        """The numbers of the samples of the step, ascending."""
        return [position_after(self.cursor, index, self.skipped) for index in range(self.global_batch_size)]

    def slots(self, replica: int) -> list[tuple[int, ...]]:
        """Return the numbers of the samples in each slot of a replica, in order. Slots without samples are last.

        Raises: ValueError when there is no such replica.
        """
        dealing, size = self.dealing, self.micro_batch_size
        if not 0 <= replica < dealing.num_replicas:
            raise ValueError(f"replica {replica} is not one of the {dealing.num_replicas} replicas of this plan")
        indices = self.order or range(self.global_batch_size)
        own = [
            tuple(position_after(self.cursor, index, self.skipped) for index in indices[first : first + size])
            for first in range(replica * size, self.global_batch_size, dealing.num_replicas * size)
        ]
        return [*own, *[()] * (dealing.num_slots(replica) - len(own))]


def idle_text(dealing: Dealing) -> str:
    """Return what an uneven layout costs, as text; empty if no replica is ever idle."""
    if not dealing.idle_share:
        return ""
    microbatches = count_text(dealing.num_microbatches, "micro-batch", "micro-batches")
    fewest, most = dealing.num_own(dealing.num_replicas - 1), dealing.num_own(0)
    return (
        f"{dealing.idle_share:.1%} of the slots are idle: {microbatches} for "
        f"{count_text(dealing.num_replicas, 'replica')}, {fewest} to {most} each"
    )
