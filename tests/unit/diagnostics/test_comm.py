"""Bandwidths, waiting times, slow links and hosts, and overlap with compute, on drawn spans."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from megatrain.contracts.black_box.operations import Operation as Op
from megatrain.contracts.layout import Layout
from megatrain_diagnostics.analysis.comm import Communication, analyze_communication, bus_factor
from megatrain_diagnostics.analysis.step_windows import read_step_events
from tests.helpers.drawn_spans import Drawing, draw_job

MB = 1_000_000


def analyze(drawing: Drawing, first: int = 1, last: int = 1) -> Communication:
    return analyze_communication(read_step_events(drawing.source(), 1, first, last), first, last)


def exchange(drawing: Drawing, operation: Op, name: str, members: tuple[int, ...], starts: tuple[float, ...],
             transfer_us: float, number: int, **more: Any) -> None:  # fmt: skip
    """Draw a collective whose transfer takes `transfer_us` after the last rank has entered."""
    group = drawing.group(name, members)
    end = max(starts) + transfer_us
    for rank, start in zip(members, starts, strict=True):
        drawing.span(operation, start, end - start, rank=rank, group=group, collective=number, **more)


@pytest.mark.parametrize(
    ("operation", "num_bytes", "algorithm_gb_s", "bus_gb_s"),
    [
        # 4 ranks, 4 MB of the whole vector in 1 ms
        (Op.DP_ALL_REDUCE, 4 * MB, 4.0, 4.0 * 2 * 3 / 4),
        (Op.GRADS_REDUCE_SCATTER, 4 * MB, 4.0, 4.0 * 3 / 4),
        (Op.PARAMS_ALL_GATHER, 1 * MB, 4.0, 4.0 * 3 / 4),  # each rank contributes a quarter
    ],
)
def test_bandwidths_of_collectives(operation: Op, num_bytes: int, algorithm_gb_s: float, bus_gb_s: float) -> None:
    drawing = Drawing(layout=Layout(dp_size=4))
    for rank in range(4):
        drawing.span(Op.STEP, 0, 5000, rank=rank)
    exchange(drawing, operation, "dp", (0, 1, 2, 3), (0, 10, 20, 500), 1000, 1, num_bytes=num_bytes)

    (found,) = analyze(drawing).bandwidths

    assert found.transfer_s == pytest.approx(1e-3)
    assert found.wait_s == pytest.approx((500 + 490 + 480) / 4 * 1e-6)
    assert found.algorithm_bandwidth == pytest.approx(algorithm_gb_s * 1e9)
    assert found.bus_bandwidth == pytest.approx(bus_gb_s * 1e9)
    assert (found.count, found.num_ranks, found.median_bytes, found.size) == (1, 4, 4 * MB, "1-16 MiB")


def test_bandwidth_of_a_link_and_its_direction() -> None:
    drawing = Drawing(layout=Layout(pp_size=2))
    link = drawing.group("pp-forward", (0, 1))
    for rank in (0, 1):
        drawing.span(Op.STEP, 0, 5000, rank=rank)
    drawing.span(Op.FORWARD_RECV, 0, 600, rank=1, group=link, collective=1, num_bytes=2 * MB)
    drawing.span(Op.FORWARD_SEND, 400, 250, rank=0, group=link, collective=1, num_bytes=2 * MB)

    (found,) = analyze(drawing).bandwidths

    assert (found.group, found.operation, found.num_ranks) == ("pp-forward", "forward-send", 2)
    assert found.algorithm_bandwidth == found.bus_bandwidth == pytest.approx(2 * MB / 200e-6)


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor(Op.TP_ALL_REDUCE.number, 8) == 1.75
    assert bus_factor(Op.TP_ALL_GATHER.number, 8) == 0.875
    assert bus_factor(Op.FORWARD_SEND.number, 2) == 1.0


def test_exposed_overlapped_and_waiting_time() -> None:
    drawing = Drawing(layout=Layout(dp_size=2))
    for rank, compute in ((0, 100), (1, 160)):
        drawing.span(Op.STEP, 0, 300, rank=rank)
        drawing.span(Op.BACKWARD_COMPUTE, 0, compute, rank=rank)
    exchange(drawing, Op.GRADS_REDUCE_SCATTER, "dp", (0, 1), (50, 120), 80, 1, num_bytes=MB)

    found = analyze(drawing)
    (one,) = found.overlaps

    # both end at 200: rank 0 has no compute from 100 on, 20 of it before rank 1 entered; rank 1 has none from 160 on
    assert (one.num_windows, one.count) == (2, 2)
    assert one.total_ns == (150 + 80) * 1000
    assert one.exposed_ns == (100 + 40) * 1000
    assert one.waiting_ns == 20 * 1000
    assert one.overlapped_ns == (50 + 40) * 1000
    assert found.exposed_percent == pytest.approx(100 * 140 / 600)


def test_common_host_of_all_slow_links_is_named() -> None:
    drawing, random = Drawing(layout=Layout(pp_size=4, dp_size=4), ranks_a_host=4), np.random.default_rng(0)
    for rank in range(drawing.layout.world_size):
        drawing.span(Op.STEP, 0, 100_000, rank=rank)
    for dp in range(4):
        for stage in range(3):
            sender, receiver = dp + 4 * stage, dp + 4 * (stage + 1)
            link = drawing.group("pp-forward", (sender, receiver))
            for number in range(1, 11):
                start = 3000.0 * number
                length = 100.0 * random.uniform(0.97, 1.03) * (1.5 if stage == 2 else 1.0)
                drawing.span(Op.FORWARD_RECV, start - 900 * (dp == 1), length + 900 * (dp == 1), rank=receiver,
                             group=link, collective=number, num_bytes=MB)  # fmt: skip
                drawing.span(Op.FORWARD_SEND, start, length, rank=sender, group=link, collective=number, num_bytes=MB)

    slow = analyze(drawing).slow

    # the receives of dp rank 1 are posted early: they wait, and their links are as fast as the others
    assert {group.ranks for group in slow.groups} == {(8, 12), (9, 13), (10, 14), (11, 15)}
    assert slow.groups[0].excess == pytest.approx(0.5, abs=0.06)
    # all of host-3's links are slow, of host-2's only those to host-3
    assert [(host.host, host.num_slow, host.num_groups) for host in slow.hosts] == [("host-3", 4, 4)]
    assert slow.num_compared == 12
    assert slow.hot_spots == ()


def test_two_groups_alone_are_not_compared() -> None:
    drawing = Drawing(layout=Layout(pp_size=2, dp_size=2))
    for rank in range(drawing.layout.world_size):
        drawing.span(Op.STEP, 0, 100_000, rank=rank)
    for dp in range(2):
        for number in range(1, 6):
            exchange(drawing, Op.PP_ALL_REDUCE, "pp", (dp, dp + 2), (900.0 * number, 900.0 * number), 100 + 200 * dp,
                     number, num_bytes=MB)  # fmt: skip

    slow = analyze(drawing).slow

    assert (slow.groups, slow.num_compared) == ((), 0)


def test_hot_spot_and_unequal_load_are_found() -> None:
    drawing = Drawing(layout=Layout(dp_size=4))
    for rank in range(drawing.layout.world_size):
        drawing.span(Op.STEP, 0, 100_000, rank=rank)
    for number in range(1, 21):
        length = 100.0 + number % 3 if number != 7 else 900.0
        exchange(drawing, Op.GRADS_REDUCE_SCATTER, "dp", (0, 1, 2), (2000.0 * number,) * 3, length, number,
                 num_bytes=MB)  # fmt: skip
    group = drawing.group("dp", (0, 1, 2))
    for rank, load in ((0, MB), (1, MB), (2, 7 * MB)):
        drawing.span(Op.DP_ALL_REDUCE, 60_000, 100, rank=rank, group=group, collective=21, num_bytes=load)

    slow = analyze(drawing).slow

    (spot,) = slow.hot_spots
    assert (spot.operation, spot.ranks, spot.step) == ("grads-reduce-scatter", (0, 1, 2), 1)
    assert spot.transfer_s == pytest.approx(900e-6)
    (load_,) = slow.unequal
    assert (load_.rank, load_.operation, load_.num_bytes, load_.mean_bytes) == (2, "dp-all-reduce", 7 * MB, 3 * MB)


def test_missing_and_short_exchanges_are_counted() -> None:
    drawing = Drawing(layout=Layout(dp_size=2))
    dp = drawing.group("dp", (0, 1))
    for rank in (0, 1):
        drawing.span(Op.STEP, 0, 1000, rank=rank)
    drawing.span(Op.GRADS_REDUCE_SCATTER, 0, 10, group=dp, collective=1, num_bytes=MB)
    drawing.span(Op.GRADS_REDUCE_SCATTER, 100, None, group=dp, collective=2, num_bytes=MB)
    drawing.span(Op.GRADS_REDUCE_SCATTER, 100, 10, rank=1, group=dp, collective=2, num_bytes=MB)
    # by the clocks, rank 0 ended before rank 1 began
    drawing.span(Op.GRADS_REDUCE_SCATTER, 200, 10, group=dp, collective=3, num_bytes=MB)
    drawing.span(Op.GRADS_REDUCE_SCATTER, 220, 10, rank=1, group=dp, collective=3, num_bytes=MB)

    # overlapped on both hosts, which poll it after their compute
    for rank in (0, 1):
        drawing.span(Op.BACKWARD_COMPUTE, 300, 100, rank=rank)
        drawing.span(Op.GRADS_REDUCE_SCATTER, 310, 95, rank=rank, group=dp, collective=4, num_bytes=MB)

    found = analyze(drawing)

    assert (found.num_exchanges, found.num_incomplete, found.num_too_short, found.num_hidden) == (4, 2, 1, 1)
    assert found.bandwidths == ()
    check_numbers(found)


def check_numbers(one: Any) -> None:
    """No figure anywhere is NaN or infinite."""
    if isinstance(one, float):
        assert math.isfinite(one)
    elif isinstance(one, tuple):
        for item in one:
            check_numbers(item)
    elif hasattr(one, "__dataclass_fields__"):
        for field in fields(one):
            check_numbers(getattr(one, field.name))


def test_ends_of_exchanges_on_hosts_and_devices() -> None:
    for flags, transfer_us in ((0, 150), (2, 80)):
        drawing = Drawing(layout=Layout(dp_size=2))
        dp = drawing.group("dp", (0, 1))
        for rank, compute, length in ((0, 100, 80), (1, 20, 150)):
            drawing.span(Op.STEP, 0, 400, rank=rank)
            drawing.span(Op.BACKWARD_COMPUTE, 0, compute, rank=rank)
            # rank 0 computes until after the end that it reports
            drawing.span(Op.GRADS_REDUCE_SCATTER, 15, length, rank=rank, group=dp, collective=1, num_bytes=MB,
                         flags=flags)  # fmt: skip

        (found,) = analyze(drawing).bandwidths

        assert found.transfer_s == pytest.approx(transfer_us * 1e-6), flags
        assert found.is_device_clock == bool(flags)


def test_end_of_the_last_host_to_begin_does_not_count() -> None:
    for flags, transfer_us in ((0, 200), (2, 10)):
        drawing = Drawing(layout=Layout(dp_size=2))
        dp = drawing.group("dp", (0, 1))
        # rank 1 begins at 100 and finds what rank 0 sent before in its host's buffers
        for rank, start, end in ((0, 0, 300), (1, 100, 110)):
            drawing.span(Op.STEP, 0, 400, rank=rank)
            drawing.span(Op.GRADS_REDUCE_SCATTER, start, end - start, rank=rank, group=dp, collective=1, num_bytes=MB,
                         flags=flags)  # fmt: skip

        (found,) = analyze(drawing).bandwidths

        assert found.transfer_s == pytest.approx(transfer_us * 1e-6), flags


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_size=2), Layout(tp_size=2, pp_size=2, dp_size=2)])
def test_whole_jobs_have_finite_figures(layout: Layout) -> None:
    found = analyze(draw_job(layout, range(10, 13), 4), 10, 12)

    assert found.steps == (10, 11, 12)
    assert bool(found.bandwidths) == (layout.world_size > 1)
    check_numbers(found)


def test_steps_without_spans() -> None:
    drawing = Drawing()
    drawing.total(Op.STEP, 0, 100)

    found = analyze(drawing)

    assert found.steps == ()
    assert "communication is not known" in found.notes[-1]
