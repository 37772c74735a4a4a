"""Jobs on the pool of ranks: run a job, assemble the pieces of its ranks, compare it with another job.

Assembling asserts what every layout must keep: all ranks report the same numbers, every copy of an element (dp and tp
replicas, the tied head) is bitwise the same, and a checkpoint would hold each element of the state exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.config.config import Config
from megatrain.reporting import EvaluationReport, StepReport
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.training_case import STATE_KINDS, CaseOrders, Piece, RankRecord, State, train_on_rank
from tests.helpers.waiting import DEADLINE_S

Arrays = dict[str, NDArray[Any]]
"""Whole tensors by logical name."""
Tables = dict[str, dict[str, Any]]
TWO_STEPS: Tables = {"train": {"steps": 2}, "optimizer": {"lr_warmup_steps": 1, "lr_decay_steps": 4}}
"""The fewest steps that test each part of a step: the second one's forward uses the weights of the first one's update,
and its update uses moments that are not zero, with another learning rate."""

SHALLOW: Tables = {"model": {"num_layers": 2}}
"""Half of the tiny model's layers, for layouts of at most two chunks: all layers have exchanges of the same kinds."""


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a job. Parameters are as the model used them; optimizer states are by kind."""

    ranks: list[RankRecord] = field(repr=False)
    initial: Arrays = field(repr=False)
    final: Arrays = field(repr=False)
    initial_state: dict[str, Arrays] = field(repr=False)
    final_state: dict[str, Arrays] = field(repr=False)

    @property
    def steps(self) -> list[StepReport]:
        return self.ranks[0].steps

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        return [report.grad_norm for report in self.steps]

    @property
    def evaluation(self) -> EvaluationReport:
        """The evaluation at the end."""
        return self.ranks[0].evaluations[-1]

    def samples_by_step(self) -> dict[int, list[int]]:
        """Return the numbers of the samples that each step trained on, by cursor, of all pipelines, sorted."""
        pipelines = {record.coordinate["dp"]: record.samples for record in self.ranks}
        cursors = self.ranks[0].samples
        return {cursor: sorted(n for samples in pipelines.values() for n in samples[cursor]) for cursor in cursors}


class TrainingJobs:
    """Runs jobs on the pool and caches the runs that others are compared with."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._remembered: dict[str, Run] = {}

    def run(
        self,
        config: Config,
        orders: CaseOrders | None = None,
        timeout_s: float = DEADLINE_S,
        *,
        worker: Callable[[RankContext, Config, CaseOrders], RankRecord] = train_on_rank,
    ) -> Run:
        """Train with `config`. Raises: RankError; AssertionError if the ranks disagree."""
        world_size = config.layout(None).world_size
        records = self._pool.run(worker, world_size, config, orders or CaseOrders(), timeout_s=timeout_s)
        for record in records[1:]:
            assert [_agreed(step) for step in record.steps] == [_agreed(step) for step in records[0].steps]
            for evaluation, first in zip(record.evaluations, records[0].evaluations, strict=True):
                assert (evaluation.loss, evaluation.sets) == (first.loss, first.sets)
        return Run(
            ranks=records,
            initial=assemble(piece for record in records for piece in record.initial),
            final=assemble(piece for record in records for piece in record.final),
            initial_state=_assemble_state([record.initial_state for record in records]),
            final_state=_assemble_state([record.final_state for record in records]),
        )

    def remembered(self, config: Config) -> Run:
        """Return the cached run of `config`."""
        key = json.dumps(config.to_dict(), sort_keys=True)
        if key not in self._remembered:
            self._remembered[key] = self.run(config)
        return self._remembered[key]


def _agreed(report: StepReport) -> str:
    """Return the values that must be equal on all ranks, bitwise (nan equals nan)."""
    counted = (report.step, report.is_skipped, report.consumed_samples)
    return repr((*counted, report.loss, report.grad_norm, report.lr, report.sources))


def assemble(pieces: Iterable[Piece]) -> Arrays:
    """Assemble pieces to whole tensors."""
    whole: Arrays = {}
    is_known: Arrays = {}
    for piece in pieces:
        if piece.name not in whole:
            whole[piece.name] = np.zeros(piece.global_shape, piece.values.dtype)
            is_known[piece.name] = np.zeros(piece.global_shape, bool)
        box, known = _box(piece), is_known[piece.name]
        is_same = bits(whole[piece.name][box]) == bits(piece.values)
        assert is_same[known[box]].all(), f"{piece.name}: ranks hold different copies of elements in {box}"
        whole[piece.name][box] = piece.values
        known[box] = True
    missing = [name for name, known in is_known.items() if not known.all()]
    assert not missing, f"no rank holds all of {missing}"
    return whole


def _assemble_state(states: Sequence[State]) -> dict[str, Arrays]:
    for kind in STATE_KINDS:
        num_savers: Arrays = {}
        for piece in (piece for state in states for piece in state[kind] if piece.is_owned):
            num_savers.setdefault(piece.name, np.zeros(piece.global_shape, int))[_box(piece)] += 1
        wrong = [name for name, counts in num_savers.items() if not (counts == 1).all()]
        assert not wrong, f"{kind}: elements of {wrong} are saved by no rank or by several"
    return {kind: assemble(piece for state in states for piece in state[kind]) for kind in STATE_KINDS}


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.values.shape, strict=True))


def bits(x: NDArray[Any]) -> NDArray[Any]:
    """Return floating-point numbers as integers: nan equals nan, and 0.0 differs from -0.0."""
    return np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}")


def assert_bitwise(found: Arrays, expected: Arrays) -> None:
    """Compare two sets of tensors bit by bit."""
    assert found.keys() == expected.keys()
    different = [name for name in expected if not np.array_equal(bits(found[name]), bits(expected[name]))]
    assert not different, f"not bitwise equal: {different}"


def assert_states_bitwise(found: dict[str, Arrays], expected: dict[str, Arrays]) -> None:
    """Compare master weights and moments bit by bit."""
    for kind in STATE_KINDS:
        assert_bitwise(found[kind], expected[kind])


def assert_close(found: Sequence[float], expected: Sequence[float], bound: float, what: str) -> None:
    """Compare two series of numbers: no relative error above `bound`."""
    assert len(found) == len(expected) > 0, what
    errors = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    assert max(errors) <= bound, f"{what}: {found}, expected {expected}"


def distance(found: Arrays, expected: Arrays) -> dict[str, float]:
    """Return ||w - w_ref|| / ||w_ref|| by tensor."""
    assert found.keys() == expected.keys()
    return {
        name: float(np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name])) for name in expected
    }


def assert_parity(run: Run, reference: Run, bound: float) -> None:
    """Compare losses, gradient norms and final weights with another run's, by relative error. All weights must move."""
    still = [name for name, was in reference.initial.items() if (reference.final[name] == was).all()]
    assert not still, f"no training changed {still}"
    assert_close(run.losses, reference.losses, bound, "loss")
    assert_close(run.grad_norms, reference.grad_norms, bound, "gradient norm")
    _assert_weights(run, reference, bound)


def assert_continues(before: Run, after: Run, reference: Run, bound: float) -> None:
    """Compare the halves of a run with a run that was not stopped: bitwise where they meet, else by relative error."""
    assert_states_bitwise(after.initial_state, before.final_state)
    assert_close(before.losses + after.losses, reference.losses, bound, "loss")
    _assert_weights(after, reference, bound)


def _assert_weights(run: Run, reference: Run, bound: float) -> None:
    wrong = {name: error for name, error in distance(run.final, reference.final).items() if not error <= bound}
    assert not wrong, f"final weights off by {wrong}"
