"""The recorded times of exchanges on a GPU are those at which they ran.

The GPUs are simulated, so the times are known.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatrain.comm.device_stream import DeviceStream, DeviceStreams
from megatrain.comm.group_plan import planned_groups
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Record, RecordFlag
from megatrain.contracts.layout import Holders, Layout
from tests.helpers.simulated_device import Simulation
from tests.helpers.simulated_ranks import DURATIONS_MS, LAUNCH_NS, MS, READ_NS, BoxedRank, receive
from tests.helpers.source_tree import ROOT

RESOLUTION_NS = 600
"""The resolution of the driver's event times, floats of milliseconds, within a few seconds."""
GAP_NS = 7_000
FLOATS, HALVES = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)


Program = Callable[[BoxedRank], None]
MakeRanks = Callable[[int], tuple[Simulation, list[BoxedRank]]]


def reduce_under_backward(boxed_rank: BoxedRank) -> None:
    """Gradients are summed during a backward, and one rank arrives late; a second bucket waits behind the first."""
    dp = boxed_rank.group("dp")
    boxed_rank.compute(Operation.FORWARD_COMPUTE, 10.0 + 12.0 * boxed_rank.rank)
    first = dp.reduce_scatter(FLOATS, Operation.GRADS_REDUCE_SCATTER)
    second = dp.reduce_scatter(FLOATS, Operation.GRADS_REDUCE_SCATTER)
    boxed_rank.compute(Operation.BACKWARD_COMPUTE, 20.0)
    first.wait()
    second.wait()
    boxed_rank.compute(Operation.OPTIMIZER, 4.0)
    dp.all_gather(FLOATS, Operation.PARAMS_ALL_GATHER).wait()


def rounded_sums(boxed_rank: BoxedRank) -> None:
    """A reduction of half precision exchanges parts, and the compute stream sums them."""
    dp = boxed_rank.group("dp")
    boxed_rank.compute(Operation.BACKWARD_COMPUTE, 3.0 * boxed_rank.rank)
    pending = dp.reduce_scatter(HALVES, Operation.GRADS_REDUCE_SCATTER, sums_in_fp32=True)
    boxed_rank.compute(Operation.BACKWARD_COMPUTE, 20.0)
    pending.wait()


def shared_stream(boxed_rank: BoxedRank) -> None:
    """Collectives of two groups of the same axis run one at a time; those of another axis run concurrently."""
    tp, few, dp = boxed_rank.group("tp"), boxed_rank.group("tp-in-1"), boxed_rank.group("dp")
    pending = [
        dp.all_gather(FLOATS, Operation.PARAMS_ALL_GATHER),
        tp.all_gather(FLOATS, Operation.TP_ALL_GATHER),
        few.all_reduce(FLOATS, Operation.TP_ALL_REDUCE),
    ]
    boxed_rank.compute(Operation.FORWARD_COMPUTE, 1.0)
    for each in pending:
        each.wait()


def messages(boxed_rank: BoxedRank) -> None:
    """A receive is posted long before its message is sent; a message in the other direction does not wait for it."""
    forward, backward = boxed_rank.group("pp-forward"), boxed_rank.group("pp-backward")
    activations, gradients = boxed_rank.channel(forward, 0, 1), boxed_rank.channel(backward, 1, 0)
    if boxed_rank.rank == 0:
        boxed_rank.compute(Operation.FORWARD_COMPUTE, 30.0)
        sent = activations.send(FLOATS, Operation.FORWARD_SEND, chunk=0, microbatch=0)
        got = receive(gradients, Operation.BACKWARD_RECV)
        boxed_rank.compute(Operation.FORWARD_COMPUTE, 30.0)
    else:
        got = receive(activations, Operation.FORWARD_RECV)
        boxed_rank.compute(Operation.BACKWARD_COMPUTE, 5.0)
        sent = gradients.send(FLOATS, Operation.BACKWARD_SEND, chunk=0, microbatch=0)
    got.wait()
    sent.wait()
    boxed_rank.compute(Operation.OPTIMIZER, 1.0)


def records_of(rank: BoxedRank) -> list[Record]:
    """Return the records, once the device has completed all work."""
    rank.now_ns = READ_NS
    rank.recorder.complete_step()
    records = rank.box().records
    return [
        record
        for record in records
        if record.flags & RecordFlag.DEVICE_CLOCK and not record.flags & RecordFlag.STEP_TOTAL
    ]


@dataclass(frozen=True)
class Timed:
    """A period on a device: begin and length in ns after the launch."""

    what: str
    begin_ns: float
    length_ns: float


@pytest.fixture
def make_ranks(tmp_path: Path) -> Iterator[MakeRanks]:
    """Return a function that creates simulated ranks. Their recorders, which have threads, are closed at the end."""
    made: list[BoxedRank] = []

    def make(num_ranks: int) -> tuple[Simulation, list[BoxedRank]]:
        simulation = Simulation(num_ranks)
        layout = Layout(dp_size=num_ranks)
        ranks = [BoxedRank(simulation, number, layout, tmp_path) for number in range(num_ranks)]
        made.extend(ranks)
        return simulation, ranks

    yield make
    for one in made:
        one.recorder.close()


def carried_out(program: Program, make_ranks: MakeRanks) -> list[BoxedRank]:
    """Run `program` on two ranks, and their devices to the end."""
    simulation, ranks = make_ranks(2)
    for rank in ranks:
        program(rank)
    simulation.run(LAUNCH_NS)
    return ranks


def true_times(rank: BoxedRank, names: Sequence[str]) -> list[Timed]:
    """Return when the exchanges and computes with these names ran, in order of their begins."""
    done = [one for one in rank.device.all_work() if one.name in names]
    found = [Timed(one.name, one.begin_ns - LAUNCH_NS, one.end_ns - one.begin_ns) for one in done]
    return sorted(found, key=lambda one: (one.begin_ns, one.what))


NAMES: dict[str, tuple[str, ...]] = {
    Operation.GRADS_REDUCE_SCATTER: ("dp reduce_scatter", "dp all_to_all"), Operation.TP_ALL_GATHER: ("tp all_gather",),
    Operation.TP_ALL_REDUCE: ("tp-in-1 allreduce",), Operation.PARAMS_ALL_GATHER: ("dp all_gather",),
    Operation.FORWARD_SEND: ("pp-forward send",), Operation.FORWARD_RECV: ("pp-forward send",),
    Operation.BACKWARD_SEND: ("pp-backward send",), Operation.BACKWARD_RECV: ("pp-backward send",),
}  # fmt: skip


@pytest.mark.parametrize("program", [reduce_under_backward, rounded_sums, shared_stream, messages])
def test_recorded_times_are_those_of_the_device(program: Program, make_ranks: MakeRanks) -> None:
    for rank in carried_out(program, make_ranks):
        records = records_of(rank)
        assert records
        for operation in {one.operation for one in records}:
            recorded = [one for one in records if one.operation == operation]
            expected = true_times(rank, NAMES.get(operation, (operation,)))
            assert len(recorded) == len(expected), operation
            for record, truth in zip(sorted(recorded, key=lambda one: one.start_ns), expected, strict=True):
                assert record.start_ns - LAUNCH_NS == pytest.approx(truth.begin_ns, abs=RESOLUTION_NS), operation
                assert record.duration_ns == pytest.approx(truth.length_ns, abs=RESOLUTION_NS), operation


def documented_bounds() -> dict[str, tuple[int, float]]:
    """Return, by kind of operation, the bound in the reference: a number of gaps, and ns."""
    text = (ROOT / "docs/reference/events.md").read_text(encoding="ascii")
    rows = re.findall(r"^\| (compute|collective|message)\b.*\| (\d*) ?g \+ ([\d.]+) us \|$", text, re.MULTILINE)
    return {kind: (int(gaps or 1), 1000 * float(microseconds)) for kind, gaps, microseconds in rows}


def kind_of(operation: str) -> str:
    known = Operation(operation)
    return "message" if known.is_point_to_point else "collective" if known.is_collective else "compute"


@pytest.mark.parametrize("program", [reduce_under_backward, rounded_sums, shared_stream, messages])
def test_errors_of_times_are_within_the_documented_bounds(program: Program, make_ranks: MakeRanks) -> None:
    bounds = documented_bounds()
    assert bounds.keys() == {"compute", "collective", "message"}
    simulation, ranks = make_ranks(2)
    simulation.gap_ns = GAP_NS
    for rank in ranks:
        program(rank)
    simulation.run(LAUNCH_NS)

    errors: dict[str, list[float]] = {}
    for rank in ranks:
        records = sorted(records_of(rank), key=lambda one: one.start_ns)
        for operation in {one.operation for one in records}:
            recorded = [one for one in records if one.operation == operation]
            for record, truth in zip(recorded, true_times(rank, NAMES.get(operation, (operation,))), strict=True):
                assert record.duration_ns is not None
                late_ns = truth.begin_ns - (record.start_ns - LAUNCH_NS)
                long_ns = record.start_ns - LAUNCH_NS + record.duration_ns - truth.begin_ns - truth.length_ns
                errors.setdefault(kind_of(operation), []).extend((late_ns, long_ns))
    for kind, found in errors.items():
        gaps, resolution_ns = bounds[kind]
        assert min(found) > -resolution_ns, "a recorded time contains the true one"
        assert max(found) == pytest.approx(gaps * GAP_NS, abs=resolution_ns), f"{kind}: the bound is reached"


def test_all_members_transfer_as_long_as_the_last_to_begin(make_ranks: MakeRanks) -> None:
    ranks = carried_out(reduce_under_backward, make_ranks)
    both = [[one for one in records_of(rank) if one.operation == Operation.GRADS_REDUCE_SCATTER] for rank in ranks]

    for first, last in zip(*both, strict=True):
        begun_ns = max(first.start_ns, last.start_ns)
        for record in (first, last):
            assert record.duration_ns is not None
            transfer_ns = record.start_ns + record.duration_ns - begun_ns
            assert transfer_ns == pytest.approx(DURATIONS_MS["reduce_scatter"] * MS, abs=2 * RESOLUTION_NS)


def test_exchange_is_done_with_the_device_and_keeps_its_memory(make_ranks: MakeRanks) -> None:
    simulation, (rank,) = make_ranks(1)
    x = torch.zeros(8)
    freed = weakref.ref(x)
    pending = rank.group("dp", (0,)).reduce_scatter(x, Operation.GRADS_REDUCE_SCATTER)
    del x

    assert not pending.is_done()
    simulation.run(LAUNCH_NS)
    assert pending.is_done()
    assert freed() is not None, "the compute stream may use the memory again, and it does not wait yet"
    pending.wait()
    assert freed() is None


def test_few_streams_serve_all_groups() -> None:
    layout, holders = Layout(pp_size=2, dp_size=2, cp_size=2, tp_size=4, ep_size=2), [Holders("tp", 2)]
    assert streams_of(layout, holders) == [
        (["tp", "tp-in-2"], True),
        (["cp"], True),
        (["dp", "edp", "dp-cp"], False),
        (["pp", "embedding"], True),
        (["ep"], True),
    ]
    # If dp has one rank, the gradients are exchanged along cp.
    assert streams_of(Layout(cp_size=2, tp_size=2), []) == [(["tp"], True), (["cp"], False)]


def streams_of(layout: Layout, holders: Sequence[Holders]) -> list[tuple[list[str], bool]]:
    """Return the groups that share a stream, and whether it is urgent, for each stream of collectives."""
    streams = DeviceStreams(Simulation(1).devices[0].new_stream)
    found: dict[DeviceStream, list[str]] = {}
    for one in planned_groups(layout, 0, holders=holders):
        if len(one.ranks) > 1 and not (one.is_link or one.uses_cpu_memory):
            found.setdefault(streams.of(one), []).append(one.name)
    return [(names, stream.is_urgent) for stream, names in found.items()]  # type: ignore[attr-defined]


def test_each_direction_of_a_link_has_a_stream() -> None:
    streams = DeviceStreams(Simulation(1).devices[0].new_stream)
    forward, backward = (one for one in planned_groups(Layout(pp_size=2), 0) if one.is_link)
    links = [streams.of(group, link) for group in (forward, backward) for link in ("to-1", "from-1")]

    assert len(set(map(id, links))) == 4
    assert streams.of(forward, "to-1") is links[0]
