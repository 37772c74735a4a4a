"""A set of ranks that communicate, and the collectives on it.

A group of one rank communicates nothing, so callers need not check whether an axis is used. Asynchronous calls return a
Pending; its `wait` returns the result. An all-reduce sums in the tensor's dtype; `reduce_scatter` may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from megatrain.comm.communicator import Communicator, is_same_memory
from megatrain.comm.exchange import Exchange, Pending, Transfer
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import CommunicationError
from megatrain.formatting import ranks_text

MAX_NAMED = 8
"""The largest number of ranks that an error names; it counts the others."""


@dataclass(slots=True)
class Group:
    """The ranks of a group, in axis order.

    `number` is the number of the group in the black box; `communicator` is None for a group of one rank; `num_calls`
    counts the submitted collectives, so that an error can name the one that failed.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    number: int = 0
    communicator: Communicator | None = None
    num_calls: int = 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_gather(self, x: Tensor, operation: Operation, *, out: Tensor | None = None, chunk: int = -1) -> Pending:
        """Start gathering every rank's `x` along dim 0, in group order. `chunk`: the stage's chunk, for the records.

        Shapes: x [n, ...] contiguous; result [size * n, ...], in `out` if given (x may be this rank's slice of out).
        Communication: one all-gather, (size - 1) * x bytes received per rank.
        """
        if self.communicator is None:
            return Pending(_copied(x, out))
        if out is None:
            out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return self._start(operation, out, x, self.communicator.all_gather(x, out), chunk)

    def reduce_scatter(
        self, x: Tensor, operation: Operation, *, out: Tensor | None = None, chunk: int = -1, sums_in_fp32: bool = False
    ) -> Pending:
        """Start summing `x` over the group, keeping this rank's slice of dim 0. `chunk`: the stage's chunk, for the
        records.

        sums_in_fp32: half precision is summed in fp32 and rounded at most once; `out` may then be fp32. The ranks then
        exchange parts, and each rank sums its own part in rank order; gloo always does so.
        Shapes: x [size * n, ...] contiguous; result [n, ...], in `out` if given (it may be this rank's slice of x).
        Communication: one reduce-scatter or all-to-all, (size - 1) / size of x's bytes sent per rank.
        Raises: ValueError when the group's size does not divide dim 0.
        """
        if x.shape[0] % self.size:
            raise ValueError(
                f"reduce-scatter over {self.name}: dim 0 of {tuple(x.shape)} must be divisible by {self.size}"
            )
        if self.communicator is None:
            return Pending(_copied(x, out))
        if out is None:
            out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        transfer = self.communicator.reduce_scatter(x, out, sums_in_fp32=sums_in_fp32)
        return self._start(operation, out, x, transfer, chunk)

    def all_to_all(self, x: Tensor, operation: Operation, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """Start sending consecutive parts of `x` to the ranks in group order, and receiving their parts in that order.

        sent, received: the sizes of the parts. If rank a sends n elements to rank b, b must receive n from a.
        Shapes: x [sum(sent)] contiguous; result [sum(received)].
        Communication: one all-to-all, x's bytes sent without the rank's own part.
        """
        if self.communicator is None:
            return Pending(x)
        out = x.new_empty(sum(received))
        return self._start(operation, out, x, self.communicator.all_to_all(x, out, sent, received))

    def all_reduce(self, x: Tensor, operation: Operation, *, maximum: bool = False) -> Pending:
        """Start summing (or taking the maximum of) `x` over the group, in place.

        Communication: one all-reduce, 2 * (size - 1) / size of x's bytes sent per rank.
        """
        if self.communicator is None:
            return Pending(x)
        return self._start(operation, x, x, self.communicator.all_reduce(x, maximum=maximum))

    def broadcast(self, x: Tensor, operation: Operation, *, source: int) -> Pending:
        """Start filling `x` on all ranks with the `x` of the group's rank number `source`.

        Communication: one broadcast, x's bytes received per rank.
        """
        if self.communicator is None:
            return Pending(x)
        return self._start(operation, x, x, self.communicator.broadcast(x, self.ranks[source]))

    def gather(self, x: Tensor, operation: Operation) -> list[Tensor] | None:
        """Return every rank's `x` in group order at the group's first rank, None at the others. Blocks.

        Shapes: `x` has the same shape on every rank.

        Communication: one gather, (size - 1) * x bytes received at the first rank.
        """
        if self.communicator is None:
            return [x]
        out = [x.new_empty(x.shape) for _ in self.ranks] if self.rank == 0 else None
        self._start(operation, x, x, self.communicator.gather(x, out, self.ranks[0])).wait()
        return out

    def set_timeout(self, seconds: float) -> None:
        """Limit the time of every later exchange on this group."""
        if self.communicator is not None:
            self.communicator.set_timeout(timedelta(seconds=seconds))

    def _start(self, operation: Operation, out: Tensor, sent: Tensor, transfer: Transfer, chunk: int = -1) -> Pending:
        assert self.communicator is not None
        self.num_calls += 1
        what = f"{operation.value} number {self.num_calls}"
        exchange = Exchange(
            operation,
            self.number,
            sent.numel() * sent.element_size(),
            transfer,
            failure=lambda error: self.failure(what, error),
            chunk=chunk,
        )
        return self.communicator.submit(out, exchange)

    def failure(self, what: str, error: Exception) -> CommunicationError:
        """Return the error that names this rank's operation and the ranks involved."""
        assert self.communicator is not None
        cause, timeout = str(error).strip() or type(error).__name__, self.communicator.timeout
        return CommunicationError(
            f"{what} on group {self.name} ({ranks_text(self.ranks, MAX_NAMED)}) failed on rank "
            f"{self.ranks[self.rank]}: {cause} "
            f"(an exchange of this phase may take {timeout.total_seconds():g} s, see runtime.*_timeout_s)"
        )


def _copied(x: Tensor, out: Tensor | None) -> Tensor:
    """Return the result in a group of one rank: `x`, or `out` with its values. Nothing is copied if both have the same
    memory."""
    if out is None:
        return x
    return out if is_same_memory(out, x) else out.copy_(x)
