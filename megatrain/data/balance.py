"""Deal the samples of a step to micro-batches and replicas by cost, so that all replicas compute equally long.

The samples of a step, the number of samples of a micro-batch and the number of micro-batches of a replica stay the
same. The heaviest samples are dealt first, in rounds of one sample for each replica: the heaviest sample of a round
goes to the replica with the least cost so far. If some replicas have one micro-batch more than the others, they get the
lightest samples of all before these rounds. Then the replica with the highest cost exchanges samples with those of the
lowest costs. The samples of a replica are dealt to its micro-batches in rounds too. The micro-batches are ordered so
that
their costs first rise and then fall: a stage of a pipeline waits while its neighbor computes a longer micro-batch, so
it waits least if the costs of successive micro-batches are similar.
Pure functions of integers: the result is the same on every host. No I/O and no clock.
Source: longest processing time first, Graham 1969, here with equal numbers of items.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.step_plan import Dealing

_GOOD_ENOUGH = 200
"""Exchanges end when no cost of a replica exceeds the mean by more than 1 / _GOOD_ENOUGH of the mean."""
_EXCHANGES = 4
"""The number of exchanges is at most the number of replicas times this."""
_PARTNERS = 4
"""For the replica with the highest cost, exchanges with this many replicas of the lowest costs are tried."""
Costs = NDArray[np.int64]
Places = NDArray[np.int64]


def balanced_order(costs: Costs, dealing: Dealing, micro_batch_size: int) -> Places:
    """Return the order in which the samples of a step are dealt: StepPlan.order.

    Micro-batch k has `micro_batch_size` samples of this order and goes to replica k mod d. Shapes: all [samples].
    """
    num_replicas, num_microbatches = dealing.num_replicas, dealing.num_microbatches
    heaviest_first = np.argsort(-costs, kind="stable")
    descending = costs[heaviest_first]
    order = np.empty((num_microbatches, micro_batch_size), np.int64)
    for replica, own in enumerate(_of_replicas(descending, dealing, micro_batch_size)):
        order[replica::num_replicas] = own[_microbatches(descending[own], micro_batch_size)]
    result: Places = heaviest_first[order.reshape(-1)]
    return result


def replica_costs(costs: Costs, dealing: Dealing, micro_batch_size: int) -> Costs:
    """Return the cost of each replica. Shapes: costs [samples], in the order in which they are dealt; result [d]."""
    of_microbatches = costs.reshape(-1, micro_batch_size).sum(axis=1)
    sums = np.zeros(dealing.num_replicas, np.int64)
    np.add.at(sums, np.arange(len(of_microbatches)) % dealing.num_replicas, of_microbatches)
    return sums


def _of_replicas(descending: Costs, dealing: Dealing, micro_batch_size: int) -> list[Places]:
    """Return the samples of each replica that has any, ascending. Shapes: descending [samples]."""
    num_used = min(dealing.num_replicas, dealing.num_microbatches)
    per_replica, num_fuller = divmod(dealing.num_microbatches, num_used)
    num_equal = per_replica * num_used * micro_batch_size
    replicas = np.empty(len(descending), np.int64)
    sums = np.zeros(num_used, np.int64)
    # the first replicas have one micro-batch more than others: it has the lightest samples of all
    replicas[num_equal:] = _in_rounds(descending[num_equal:], sums[:num_fuller])
    replicas[:num_equal] = _in_rounds(descending[:num_equal], sums)
    samples = [np.flatnonzero(replicas == replica) for replica in range(num_used)]
    _exchange(descending, samples, sums)
    return samples


def _in_rounds(descending: Costs, sums: Costs) -> Places:
    """Return the part to which each item goes, the heaviest item of a round to the part with the lowest sum.

    The costs are added to `sums`. Each part gets one item in a round. Shapes: descending [items], sums [parts].
    """
    parts = np.empty(len(descending), np.int64)
    for first in range(0, len(descending), max(1, len(sums))):
        items = descending[first : first + len(sums)]
        lowest = np.argsort(sums, kind="stable")[: len(items)]
        parts[first : first + len(sums)] = lowest
        sums[lowest] += items
    return parts


def _exchange(descending: Costs, samples: list[Places], sums: Costs) -> None:
    """Exchange samples of the replica with the highest sum, until no exchange that is tried lowers it, or it is near
    the mean.

    `samples` and `sums` change. The samples of a replica are ascending, so their costs descend.
    """
    mean = int(sums.sum()) // len(sums)
    for _ in range(_EXCHANGES * len(sums)):
        highest = int(sums.argmax())
        if (int(sums[highest]) - mean) * _GOOD_ENOUGH <= mean:
            return
        for other in np.argsort(sums, kind="stable")[:_PARTNERS].tolist():
            difference = int(sums[highest] - sums[other])
            given, taken = _best_pair(descending[samples[highest]], descending[samples[other]], difference)
            moved = int(descending[samples[highest][given]] - descending[samples[other][taken]])
            if 0 < moved < difference:
                break
        else:
            return
        sums[highest] -= moved
        sums[other] += moved
        swapped = samples[highest][given], samples[other][taken]
        samples[other][taken], samples[highest][given] = swapped
        samples[highest].sort()
        samples[other].sort()


def _best_pair(own: Costs, others: Costs, difference: int) -> tuple[int, int]:
    """Return the indices of a sample of each of two replicas whose exchange brings the two sums closest together.

    Shapes: own and others [samples], descending; the replica of `own` has the greater sum by `difference`.
    """
    wanted = own - difference // 2
    # the two costs of the other replica that are nearest to what is wanted for each own sample
    after = np.searchsorted(-others, -wanted)
    near = np.clip(np.stack([after - 1, after]), 0, len(others) - 1)
    side, given = divmod(int(np.abs(others[near] - wanted).argmin()), len(own))
    return given, int(near[side, given])


def _microbatches(descending: Costs, micro_batch_size: int) -> Places:
    """Return the samples of each micro-batch of a replica. The costs of the micro-batches first rise and then fall.

    Shapes: descending [samples], result [micro-batches, micro_batch_size].
    """
    sums = np.zeros(len(descending) // micro_batch_size, np.int64)
    microbatches = _in_rounds(descending, sums)
    samples = np.argsort(microbatches, kind="stable").reshape(len(sums), micro_batch_size)
    rising = np.argsort(sums, kind="stable")
    result: Places = samples[np.concatenate([rising[::2], rising[1::2][::-1]])]
    return result
