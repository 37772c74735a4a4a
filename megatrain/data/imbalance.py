"""The imbalance of replicas: the largest cost of a replica divided by the mean cost of all, in the steps of a run.

Only the index of the tokens is read, so that a dry run can compute the imbalance.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from megatrain.config.model_products import DocumentCost
from megatrain.contracts.step_plan import StepPlan
from megatrain.data.balance import balanced_order, replica_costs
from megatrain.data.reader import BatchReader


class Imbalance(NamedTuple):
    """The largest cost of a replica in a step divided by the mean cost of all replicas, over some steps.

    `in_order`: the samples are dealt in the order of their numbers. `by_cost`: as data.balance="cost" deals them.
    """

    in_order: float
    by_cost: float


def expected_imbalance(reader: BatchReader, plans: Iterable[StepPlan], cost: DocumentCost) -> Imbalance:
    """Return the imbalance of the steps of these plans, of which there must be at least one.

    Raises: DataError when a file of packed samples is damaged.
    """
    longest, mean = np.zeros(2), 0.0
    for plan in plans:
        dealing, size = plan.dealing, plan.micro_batch_size
        costs = reader.costs(np.array(plan.samples, dtype=np.int64), cost)
        dealt = costs, costs[balanced_order(costs, dealing, size)]
        longest += [replica_costs(one, dealing, size).max() for one in dealt]
        mean += float(costs.sum()) / dealing.num_replicas
    return Imbalance(*(longest / mean).tolist())
