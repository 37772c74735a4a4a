"""Drift of jobs with known changes: which step, which cause; and no alarm in jobs without changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import Operation as Op
from megatrain.contracts.black_box.operations import StepValue
from megatrain.contracts.errors import DataError
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.drift import Drift, analyze_drift
from megatrain_diagnostics.analysis.trends import hours_of_day
from megatrain_diagnostics.events.tables import StepTotals, Values
from tests.helpers.drawn_spans import BASE_NS, Drawing
from tests.helpers.memory_events import MemoryEvents
from tests.helpers.table_rows import table_rows

LAYOUT = Layout(tp_size=1, pp_size=2, dp_size=4)
CHANGE = 120
OWN_WORK = {Op.FORWARD_COMPUTE: 20.0, Op.BACKWARD_COMPUTE: 40.0, Op.BACKWARD_WEIGHT_COMPUTE: 0.0, Op.DATA_WAIT: 1.0,
            Op.OPTIMIZER: 4.0}  # fmt: skip
"""In ms per step."""
TRANSFERS = {Op.GRADS_REDUCE_SCATTER: 6.0, Op.FORWARD_RECV: 2.0}
USUAL = {**OWN_WORK, **TRANSFERS}
GROUPS = [LAYOUT.ranks_along(rank, "dp") for rank in range(LAYOUT.world_size)]
"""Ranks that reduce their gradients together, by rank."""
Costs = Callable[[Op, int, int], float]


@dataclass(frozen=True)
class DriftJob:
    """A job of many steps as sums: `cost(operation, rank, step)` is additional time in ms."""

    cost: Costs = lambda operation, rank, step: 0.0
    num_steps: int = 240
    noise: float = 0.01
    seed: int = 0
    work: Callable[[int], float] = lambda step: 1e12
    checkpoints: Sequence[int] = ()

    def source(self) -> MemoryEvents:
        """Return the events: its group waits for a slow rank in the reduce-scatter, the other group in the norm."""
        random = np.random.default_rng(self.seed)
        columns: dict[str, list[float]] = {name: [] for name in ("rank", "step", "operation", "start_ns", "sum_ns")}
        values: dict[str, list[float]] = {name: [] for name in ("rank", "step", "kind", "at_ns", "value")}
        now_ns = BASE_NS
        for step in range(self.num_steps):
            spent = [self._spent(rank, step, random) for rank in range(LAYOUT.world_size)]
            busy_ms = [sum(one.values()) for one in spent]
            step_ms = max(busy_ms)
            for rank, own in enumerate(spent):
                of_group = max(busy_ms[member] for member in GROUPS[rank])
                wait = of_group - busy_ms[rank]
                sums = {**own, Op.GRADS_REDUCE_SCATTER: own[Op.GRADS_REDUCE_SCATTER] + wait,
                        Op.PP_ALL_REDUCE: step_ms - of_group, Op.STEP: step_ms - own[Op.DATA_WAIT]}  # fmt: skip
                if step in self.checkpoints:
                    sums[Op.CHECKPOINT] = 300.0
                    sums[Op.STEP] += 200.0  # the transfer of a snapshot slows the next step
                rows = [(rank, step, operation.number, now_ns, amount * 1e6) for operation, amount in sums.items()]
                for name, added in zip(columns, zip(*rows, strict=True), strict=True):
                    columns[name] += added
                for name, value in zip(values, (rank, step, StepValue.MODEL_FLOPS, now_ns, self.work(step)),
                                       strict=True):  # fmt: skip
                    values[name].append(value)
            now_ns += int(step_ms * 1e6)
        tables = Drawing(layout=LAYOUT).tables()
        return MemoryEvents({**tables, StepTotals: totals(columns), Values: with_keys(Values, values)})

    def _spent(self, rank: int, step: int, random: np.random.Generator) -> Mapping[Op, float]:
        factors = (1.0 + self.noise * random.standard_normal(len(USUAL))).tolist()
        return {
            operation: amount * factor + self.cost(operation, rank, step)
            for (operation, amount), factor in zip(USUAL.items(), factors, strict=True)
        }


def totals(columns: Mapping[str, list[float]]) -> StepTotals:
    return with_keys(StepTotals, {**columns, "max_ns": columns["sum_ns"], "count": 1})


def with_keys(kind, columns):
    return table_rows(kind, {"round": 1, "sequence": range(len(columns["rank"])), **columns})


def drift(job: DriftJob) -> Drift:
    return analyze_drift(job.source(), 1)


def test_no_alarm_in_stationary_jobs() -> None:
    for seed in range(6):
        found = drift(DriftJob(seed=seed, noise=0.05, num_steps=120))
        assert (found.changes, found.rate_changes) == ((), ())
        assert found.step_trend is not None
        assert not found.step_trend.is_rising
        assert not found.step_trend.is_falling


@pytest.mark.parametrize("slow", [Op.BACKWARD_COMPUTE, Op.BACKWARD_WEIGHT_COMPUTE])
def test_slow_rank_is_named_while_others_wait_for_it(slow: Op) -> None:
    found = drift(DriftJob(cost=lambda op, rank, step: 20.0 * (op is slow and rank == 5 and step >= CHANGE)))

    (change,) = found.changes
    assert abs(change.step - CHANGE) <= 1
    assert change.shift == pytest.approx(20 / 73, abs=0.03)
    assert change.before_s == pytest.approx(0.073, rel=0.03)
    cause = change.moved[0]
    assert (cause.operation, cause.ranks, cause.hosts) == (slow, (5,), ("host-2",))
    assert cause.explained == pytest.approx(1.0, abs=0.1)
    # the collectives of seven ranks grew as much, but in each group one rank waits no longer than before
    assert [one.operation for one in change.moved if one.explained > 0.4] == [slow]
    assert not change.is_of_work


def test_slow_network_is_the_reduce_scatter_of_its_group() -> None:
    found = drift(
        DriftJob(cost=lambda op, rank, step: 15.0 * (op is Op.GRADS_REDUCE_SCATTER and rank >= 4 and step >= CHANGE))
    )

    (change,) = found.changes
    assert change.moved[0].operation == "grads-reduce-scatter"
    assert change.moved[0].ranks == (4, 5, 6, 7)


def test_data_that_comes_late_is_the_cause() -> None:
    found = drift(DriftJob(cost=lambda op, rank, step: 12.0 * (op is Op.DATA_WAIT and step >= CHANGE)))

    assert [change.moved[0].operation for change in found.changes] == ["data-wait"]
    assert found.changes[0].moved[0].ranks == tuple(range(LAYOUT.world_size))


@pytest.mark.parametrize(
    "compute",
    [
        {Op.FORWARD_COMPUTE: 5.0, Op.BACKWARD_COMPUTE: 5.0},
        {Op.FORWARD_COMPUTE: 4.0, Op.BACKWARD_COMPUTE: 3.0, Op.BACKWARD_WEIGHT_COMPUTE: 3.0},
    ],
    ids=["whole", "split"],
)
def test_device_that_slows_down_slows_forward_and_backward(compute: dict[Op, float]) -> None:
    found = drift(
        DriftJob(cost=lambda op, rank, step: (compute.get(op, 0.0) + 3.8 * (op is Op.FORWARD_RECV)) * (step >= CHANGE))
    )

    (change,) = found.changes
    assert change.moved[0].operation == "forward-compute and backward-compute"
    assert change.moved[0].explained == pytest.approx(10 / 13.8, abs=0.1)
    assert all(one.explained < 0.4 for one in change.moved[1:])


def test_slow_collectives_are_not_blamed_on_compute() -> None:
    layout = Layout(tp_size=2)
    columns: dict[str, list[float]] = {name: [] for name in ("rank", "step", "operation", "start_ns", "sum_ns")}
    for step in range(80):
        slow = 20.0 if step >= 40 else 0.0
        for rank in range(2):
            sums = {Op.STEP: 70.0 + slow, Op.FORWARD_COMPUTE: 60.0 + slow, Op.TP_ALL_REDUCE: 10.0 + slow}
            for operation, amount in sums.items():
                row = (rank, step, operation.number, BASE_NS + step * 10**8, amount * 1e6)
                for name, value in zip(columns, row, strict=True):
                    columns[name].append(value)

    found = analyze_drift(MemoryEvents({**Drawing(layout=layout).tables(), StepTotals: totals(columns)}), 1)

    (change,) = found.changes
    assert [one.operation for one in change.moved] == ["tp-all-reduce"]
    assert change.moved[0].explained == pytest.approx(1.0)


def test_change_to_a_faster_pace_names_its_cause() -> None:
    found = drift(
        DriftJob(cost=lambda op, rank, step: 20.0 * (op is Op.FORWARD_COMPUTE and rank == 3 and step < CHANGE))
    )

    (change,) = found.changes
    assert change.shift < -0.15
    assert (change.moved[0].operation, change.moved[0].ranks) == ("forward-compute", (3,))
    assert change.moved[0].delta_s == pytest.approx(-0.02, rel=0.1)


def test_larger_batch_is_no_fault() -> None:
    job = DriftJob(
        cost=lambda op, rank, step: OWN_WORK[op] * 0.5 * (op in (Op.FORWARD_COMPUTE, Op.BACKWARD_COMPUTE)
                                                           and step >= CHANGE) if op in OWN_WORK else 0.0,
        work=lambda step: 1.45e12 if step >= CHANGE else 1e12,
    )  # fmt: skip

    found = drift(job)

    (change,) = found.changes
    assert change.is_of_work
    assert change.work_shift == pytest.approx(0.45)
    assert found.rate_changes == ()


def test_less_work_in_the_same_time_changes_the_mfu() -> None:
    found = drift(DriftJob(work=lambda step: 0.7e12 if step >= CHANGE else 1e12))

    assert found.changes == ()
    (change,) = found.rate_changes
    assert abs(change.step - CHANGE) <= 1
    assert change.shift > 0.3


def test_first_steps_and_steps_after_checkpoints_are_left_out() -> None:
    checkpoints = tuple(range(20, 240, 20))
    found = drift(DriftJob(checkpoints=checkpoints))

    assert found.changes == ()
    assert found.num_left_out == 3 + len(checkpoints)
    assert found.step_s == pytest.approx(0.074, rel=0.03)


def test_slow_decline_is_a_trend() -> None:
    found = drift(DriftJob(cost=lambda op, rank, step: 0.08 * step * (op is Op.FORWARD_COMPUTE)))

    assert found.step_trend is not None
    assert found.step_trend.is_rising
    assert found.step_trend.per_1000 == pytest.approx(0.08, rel=0.05)
    assert found.rate_trend is not None
    assert found.rate_trend.is_falling


def test_growing_collections_and_their_share() -> None:
    job = DriftJob(cost=lambda op, rank, step: 0.0).source()
    sums = job.read(StepTotals)
    rows = np.flatnonzero((sums.operation == Op.STEP.number) & (sums.step % 5 == 0))
    gc = {name: getattr(sums, name)[rows] for name in ("rank", "step", "start_ns")}
    more = {**gc, "operation": np.full(len(rows), Op.GC.number), "sum_ns": 1_000_000 * (5 + gc["step"] // 20)}
    joined = {name: np.concatenate([getattr(sums, name), values]) for name, values in more.items()}
    source = MemoryEvents(
        {**Drawing(layout=LAYOUT).tables(), StepTotals: totals({n: list(v) for n, v in joined.items()})}
    )

    found = analyze_drift(source, 1)

    assert found.gc_share == pytest.approx(0.2 * 10.5 / 73, rel=0.1)
    assert found.gc_trend is not None
    assert found.gc_trend.is_rising


def draw_scatters(stagger_us: Callable[[int], Sequence[float]], steps: Sequence[int]) -> MemoryEvents:
    """Draw sampled steps in which ranks compute, launch on a device, and begin the reduce-scatter apart."""
    drawing = Drawing(layout=Layout(dp_size=3))
    dp = drawing.group("dp", (0, 1, 2))
    for number, step in enumerate(steps, start=1):
        begin = step * 10_000.0
        late = stagger_us(step)
        for rank in range(3):
            drawing.total(Op.STEP, begin, 8_000, rank=rank, step=step)
            drawing.total(Op.STEP, begin + 8_000, 8_000, rank=rank, step=step + 1)
            drawing.span(Op.STEP, begin, 8_000, rank=rank, step=step)
            drawing.span(Op.BACKWARD_COMPUTE, begin, 4_000, rank=rank, step=step, flags=2,
                         launch_ns=BASE_NS + round((begin - 150) * 1000))  # fmt: skip
            start = begin + 4_000 + late[rank]
            drawing.span(Op.GRADS_REDUCE_SCATTER, start, begin + 7_000 - start, rank=rank, step=step, group=dp,
                         collective=number)  # fmt: skip
    return drawing.source()


def test_stagger_that_grows_and_changes_its_last_rank() -> None:
    def late(step: int) -> tuple[float, ...]:
        return tuple(5.0 + step if rank == step // 10 % 3 else 0.0 for rank in range(3))

    found = analyze_drift(draw_scatters(late, range(0, 300, 10)), 1)

    assert found.stagger is not None
    assert found.stagger.trend is not None
    assert found.stagger.trend.is_rising
    assert found.stagger.trend.per_1000 == pytest.approx(1e-3, rel=0.01)
    assert not found.stagger.is_persistent
    assert found.num_sampled == 30


def test_stagger_of_one_rank_is_a_straggler() -> None:
    found = analyze_drift(draw_scatters(lambda step: (0.0, 0.0, 400.0), range(0, 300, 10)), 1)

    assert found.stagger is not None
    assert (found.stagger.last_rank, found.stagger.last_host, found.stagger.last_share) == (2, "host-1", 1.0)
    assert found.stagger.median_s == pytest.approx(400e-6)
    assert found.stagger.is_persistent
    assert found.stagger.trend is not None
    assert not found.stagger.trend.is_rising


def test_issue_latency_and_idle_device_time() -> None:
    found = analyze_drift(draw_scatters(lambda step: (0.0, 0.0, 0.0), range(0, 300, 10)), 1)

    (latency,) = found.latencies
    assert (latency.operation, latency.count) == ("backward-compute", 90)
    assert latency.median_s == pytest.approx(150e-6)
    # 4 ms of compute, 3 ms of reduce-scatter, of 8 ms
    assert found.void == pytest.approx(1 / 8)


def test_sums_alone_give_no_stagger_or_latency() -> None:
    found = drift(DriftJob(num_steps=30))

    assert found.stagger is None
    assert found.void == -1.0
    assert found.latencies == ()
    assert found.hours is None
    assert "no step was recorded span by span" in found.notes[0]


@pytest.mark.parametrize(("num_steps", "message"), [(0, "has no step"), (2, "except 2 at the beginning")])
def test_too_few_steps_are_refused(num_steps: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        drift(DriftJob(num_steps=num_steps))


def test_slowest_hour_of_the_day() -> None:
    hours = np.arange(48 * 60)  # a step a minute for two days
    at_ns = BASE_NS + hours * 60 * 10**9
    of_day = at_ns // (3600 * 10**9) % 24
    seconds = np.where(of_day == 3, 1.2, 1.0)

    found = hours_of_day(at_ns, seconds)

    assert found is not None
    assert (found.slowest, found.is_notable) == (3, True)
    assert found.excess == pytest.approx(0.2)
    assert hours_of_day(at_ns[:600], seconds[:600]) is None
    even = hours_of_day(at_ns, np.ones(len(at_ns)))
    assert even is not None
    assert not even.is_notable


def test_rank_that_sends_garbage_changes_nothing() -> None:
    job = DriftJob(num_steps=60)
    source = job.source()
    sums = source.read(StepTotals)
    garbage = replace(
        sums, rank=np.where(sums.rank == 7, 4000, sums.rank), sum_ns=np.where(sums.rank == 7, -5, sums.sum_ns)
    )
    found = analyze_drift(MemoryEvents({**Drawing(layout=LAYOUT).tables(), StepTotals: garbage}), 1)

    assert found.changes == ()
    assert found.step_s == pytest.approx(0.074, rel=0.03)
