"""The overlap benchmark: ideal times in closed form and of a trace, paced compute, and rows that are measured again."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from benchmarks.overlap import bars_of, is_known, is_valid
from benchmarks.overlap_cases import OverlapCase
from benchmarks.overlap_cost import ExchangeCost, cost_columns, measured_cost
from benchmarks.overlap_ideal import Computes, ideal_of_schedule, sent_bytes
from benchmarks.overlap_pace import LayerPace
from benchmarks.overlap_trace import MARK, OverlapTrace, SentMessage, ideal_of_calls, sent_by_calls, traced
from megatrain.comm import Pending, dry_mesh
from megatrain.comm.group import Group
from megatrain.config.config import Config
from megatrain.config.model import ModelConfig
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Record, RecordFlag
from megatrain.contracts.layout import Layout
from megatrain.model import TokenContext, Transformer
from megatrain.schedule import ActionKind

FORWARD_S, BACKWARD_S, UPDATE_S = 1.0, 2.0, 0.5
FREE = 1e15


def config_of(**parallel: object) -> Config:
    return Config.from_dict(
        {
            "model": {"vocab_size": 64, "seq_len": 8, "hidden_size": 16, "num_layers": 8, "num_heads": 2},
            "parallel": {
                "schedule": "interleaved" if parallel.get("num_chunks", 1) != 1 else "1f1b",
                "dp_size": 1,
                **parallel,
            },
            "batch": {"micro_batch_size": 2, "global_batch_size": 16},
            "train": {"steps": 1, "precision": "fp32"},
            "optimizer": {"lr": 1e-4},
            "runtime": {"device": "cpu"},
        }
    )


def computes_of(config: Config) -> list[Computes]:
    layout = config.layout(None)
    schedule = config.parallel.build_schedule(config.num_microbatches(layout))
    seconds = {ActionKind.FORWARD: FORWARD_S, ActionKind.BACKWARD: BACKWARD_S}
    found = []
    for rank in range(layout.world_size):
        actions = schedule.stages[layout.coordinate(rank)["pp"]]
        parts = {(a.kind, a.chunk, a.microbatch): seconds[a.kind] for a in actions if a.kind in seconds}
        found.append(Computes(parts, UPDATE_S))
    return found


@pytest.mark.parametrize(("pp_size", "num_chunks", "dp_size"), [(1, 1, 1), (1, 4, 2), (2, 1, 1), (4, 2, 2)])
def test_with_free_links_a_step_computes_and_has_its_bubble(pp_size: int, num_chunks: int, dp_size: int) -> None:
    config = config_of(pp_size=pp_size, num_chunks=num_chunks, dp_size=dp_size)
    num_microbatches = config.num_microbatches(config.layout(None))

    per_chunk = FORWARD_S + BACKWARD_S
    expected = (num_microbatches * num_chunks + pp_size - 1) * per_chunk + UPDATE_S
    assert ideal_of_schedule(config, computes_of(config), FREE) == pytest.approx(expected)


@pytest.mark.parametrize(("num_chunks", "bucket_size"), [(1, 1_000_000), (1, 1), (4, 1)])
def test_only_the_last_bucket_of_backward_is_waited_for(num_chunks: int, bucket_size: int) -> None:
    """It is the first bucket of forward. With large buckets it is nearly everything, and almost nothing is
    overlapped."""
    config = config_of(dp_size=2, num_chunks=num_chunks, bucket_size=bucket_size)
    buckets = sent_bytes(config)[0][0, 0]
    assert len(buckets) >= 2
    rate = sum(buckets) / (3.0 if bucket_size > 1 else 0.1)
    compute = config.num_microbatches(config.layout(None)) * num_chunks * (FORWARD_S + BACKWARD_S) + UPDATE_S

    assert ideal_of_schedule(config, computes_of(config), rate) == pytest.approx(compute + 2 * buckets[-1] / rate)


def test_a_message_is_waited_for_where_no_compute_lies_between() -> None:
    config = config_of(pp_size=2)
    bucket_bytes, message_bytes = sent_bytes(config)
    assert {size for sizes in bucket_bytes.values() for size in sizes} == {0}
    assert message_bytes == 8 * 2 * 16 * 4
    late = ideal_of_schedule(config, computes_of(config), message_bytes / 0.1)
    free = ideal_of_schedule(config, computes_of(config), FREE)

    # 1F1B: the first activation, the last gradient, and the messages of the two stages in between
    assert free + 2 * 0.1 <= late + 1e-9
    assert late <= free + 2 * 8 * 0.1


RANKS = (0, 1)
PIECE = 100.0
START, WAIT = False, True


def trace_of(operation: Operation, calls: list[tuple[int, bool, float]], rest: float = 0.0) -> OverlapTrace:
    num_exchanges = 1 + max(number for number, _, _ in calls)
    exchanges = [SentMessage(RANKS, operation.value, PIECE) for _ in range(num_exchanges)]
    return OverlapTrace(exchanges, [(MARK, False, 0.0), *calls, (MARK, False, rest)])


def ideal(*traces: OverlapTrace, rate: float = PIECE) -> float:
    """With the given rate, a piece travels for one second."""
    return ideal_of_calls([[trace] for trace in traces], rate)


def test_sequence_chunks_awaited_later_overlap_with_products() -> None:
    # All start first; each is awaited before its product of 1 s.
    calls = [(number, START, 0.0) for number in range(4)]
    calls += [(0, WAIT, 0.0), (1, WAIT, 1.0), (2, WAIT, 1.0), (3, WAIT, 1.0)]
    gathered = trace_of(Operation.TP_ALL_GATHER, calls, rest=1.0)

    assert sent_by_calls(gathered) == 4 * PIECE
    assert ideal(gathered, gathered) == pytest.approx(5.0)  # the first piece, then four products


def test_exchange_awaited_at_once_is_exposed() -> None:
    blocking = trace_of(Operation.DP_ALL_REDUCE, [(0, START, 1.0), (0, WAIT, 0.0), (1, START, 1.0), (1, WAIT, 0.0)])

    assert ideal(blocking, blocking) == pytest.approx(4.0)


def test_an_exchange_begins_when_both_ranks_have_come() -> None:
    early = trace_of(Operation.TP_ALL_GATHER, [(0, START, 0.0), (0, WAIT, 0.0)], rest=1.0)
    late = trace_of(Operation.TP_ALL_GATHER, [(0, START, 3.0), (0, WAIT, 0.0)], rest=1.0)

    assert ideal(early, late) == pytest.approx(5.0)


def test_gradients_of_the_last_layer_are_exposed() -> None:
    # Four layers of 2 s; the gradients of each, of 1 s, are sent when its backward is over.
    calls = [(number, START, 2.0) for number in range(4)] + [(number, WAIT, 0.0) for number in range(4)]
    by_layer = trace_of(Operation.GRADS_REDUCE_SCATTER, calls)
    at_the_end = [(number, START, 8.0 if number == 0 else 0.0) for number in range(4)]
    whole = trace_of(Operation.GRADS_REDUCE_SCATTER, at_the_end + [(number, WAIT, 0.0) for number in range(4)])

    assert ideal(by_layer, by_layer) == pytest.approx(8.0 + 1.0)
    assert ideal(whole, whole) == pytest.approx(8.0 + 4.0)


def test_traced_exchange_has_its_wait_where_the_program_awaits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def pass_(seconds: float) -> None:
        nonlocal now
        now += seconds

    result, gradients = torch.zeros(4), torch.zeros(8)
    monkeypatch.setattr("benchmarks.overlap_trace.time.perf_counter", lambda: now)
    monkeypatch.setattr(Group, "_start", lambda *_, **__: Pending(result, lambda: pass_(100.0)))
    with dry_mesh(Layout(dp_size=2), 0) as mesh:
        group = mesh.replicas
    with traced() as (trace, mark):
        mark()
        pass_(1.0)
        pending = group.reduce_scatter(gradients, Operation.GRADS_REDUCE_SCATTER, out=result)
        assert now == 101.0, "it was awaited at once"
        pass_(2.0)
        assert pending.wait() is result
        pass_(4.0)
        mark()

    # The time of the wait is not compute.
    assert trace.calls == [(MARK, False, 0.0), (0, START, 1.0), (0, WAIT, 2.0), (MARK, False, 4.0)]
    # Of 8 numbers a rank sends the half that belongs to the other rank.
    assert trace.exchanges == [SentMessage(RANKS, Operation.GRADS_REDUCE_SCATTER.value, 16.0)]


def test_medians_of_blocks_count_and_their_calls_must_agree() -> None:
    def of(seconds: float) -> OverlapTrace:
        return trace_of(Operation.TP_ALL_GATHER, [(0, START, seconds), (0, WAIT, 0.0)])

    assert ideal_of_calls([[of(1.0), of(2.0), of(9.0)]], PIECE) == pytest.approx(3.0)
    other = trace_of(Operation.TP_ALL_GATHER, [(0, START, 1.0), (0, WAIT, 0.0), (0, WAIT, 0.0)])
    with pytest.raises(AssertionError, match="the blocks of rank 0 differ"):
        ideal_of_calls([[of(1.0), other]], PIECE)


def test_spans_outside_the_marks_do_not_count() -> None:
    # a step of 2 s, whose exchange overlaps with the next step
    step = [(0, START, 2.0), (0, WAIT, 0.0)]
    calls = [*step, (MARK, False, 0.0), (0, WAIT, 0.0), (1, START, 2.0), (1, WAIT, 0.0), (MARK, False, 0.0)]
    trace = OverlapTrace([SentMessage(RANKS, Operation.PARAMS_ALL_GATHER.value, PIECE)] * 2, [*calls, (1, WAIT, 7.0)])

    assert ideal(trace, trace) == pytest.approx(3.0)


def exchange_of(number: int, step: int, num_bytes: int, seconds: float) -> Record:
    """A recorded reduce-scatter."""
    kind = Operation.GRADS_REDUCE_SCATTER.number
    return Record(number, 0, round(seconds * 1e9), 0, num_bytes, step, number, -1, -1, kind, 3, RecordFlag.NONE)


def test_cost_of_exchanges_is_that_on_the_rank_that_comes_last() -> None:
    """A rank sends half of its input: at 1,000 bytes a second, with a latency of 2 s, 1,000 bytes take 2.5 s."""
    sizes = {1: 1000, 2: 1000, 3: 1000, 4: 8000}
    last = [exchange_of(number, 7, size, 2.0 + size / 2000.0) for number, size in sizes.items()]
    last[2] = exchange_of(3, 7, 1000, 90.0)  # It was disturbed.
    first = [exchange_of(number, 7, size, 100.0) for number, size in sizes.items()]
    other_step = exchange_of(5, 8, 8000, 50.0)
    unanswered = exchange_of(6, 7, 8000, 70.0)

    cost = measured_cost([[*first, other_step, unanswered], [*last, other_step]], {7})

    assert cost is not None
    assert (cost.latency_s, cost.rate) == pytest.approx((2.0, 1000.0))


@pytest.mark.parametrize(
    "seconds_of_bytes",
    [
        pytest.param({}, id="no exchange"),
        pytest.param({1000: 2.5}, id="one size"),
        pytest.param({1000: 2.5, 8000: 2.0}, id="falling"),
        pytest.param({1000: 0.1, 8000: 6.0}, id="negative latency"),
    ],
)
def test_without_a_cost_of_exchanges_its_columns_are_empty(seconds_of_bytes: dict[int, float]) -> None:
    box = [exchange_of(number, 7, *one) for number, one in enumerate(seconds_of_bytes.items(), start=1)]

    cost = measured_cost([box, box], {7})

    assert set(cost_columns([], cost, num_steps=2).values()) == {"-"}


def test_ideals_show_what_rate_and_latency_of_exchanges_cost() -> None:
    """Two blocks' steps; half of the rate, then 0.25 s more for each exchange."""
    blocking = trace_of(Operation.DP_ALL_REDUCE, [(0, START, 1.0), (0, WAIT, 0.0), (1, START, 1.0), (1, WAIT, 0.0)])

    columns = cost_columns([[blocking], [blocking]], ExchangeCost(0.25, PIECE / 2.0), num_steps=2)

    assert [*columns.values()] == pytest.approx([250.0, 50e-6, 3000.0, 3250.0])


LAYER_S = 10.0


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_paced_layer_writes_its_gradients_at_its_end(
    block: Literal["serial", "parallel"], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    config = ModelConfig(
        vocab_size=32, seq_len=4, hidden_size=8, num_layers=2, num_heads=2, block=block, has_tied_head=False
    )
    module = Transformer(config)
    assert module.embedding is not None
    assert module.loss_head is not None
    for name, part in (("embedding", module.embedding), *module.blocks.items(), ("head", module.loss_head)):
        part.register_forward_hook(lambda *_, name=name: seen.append(f"forward {name}"))
        for parameter in part.parameters():
            torch.nn.init.ones_(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"gradient {name}"))
    # The clocks are frozen: the waited time is the requested time.
    for clock in ("monotonic", "thread_time"):
        monkeypatch.setattr(f"benchmarks.overlap_pace.time.{clock}", lambda: 0.0)
    monkeypatch.setattr("benchmarks.overlap_pace.pause_until", seen.append)
    LayerPace(LAYER_S).attach(module)

    tokens_SB = torch.zeros(4, 1, dtype=torch.int64)
    module(tokens_SB, TokenContext(sample_B=torch.zeros(1), seq_len=4), tokens_SB).backward()

    size = sum(one.numel() for one in module.blocks["0"].parameters())
    first, last = (
        LAYER_S * sum(one.numel() for one in part.parameters()) / size for part in (module.embedding, module.loss_head)
    )
    forward = ["forward embedding", first, "forward 0", LAYER_S, "forward 1", LAYER_S, "forward head", last]
    backward = [2.0 * last, "gradient head", 2.0 * LAYER_S, "gradient 1", 2.0 * LAYER_S, "gradient 0", 2.0 * first,
                "gradient embedding"]  # fmt: skip
    without_repeats = [one for at, one in enumerate(seen) if at == 0 or one != seen[at - 1] or isinstance(one, float)]
    assert without_repeats == [*forward, *backward]


CASE = OverlapCase("two ranks", {"dp_size": 2}, 1, (0.8, 1.08))
ROW = {"free link, ms": 1000.0, "free link after, ms": 1000.0, "communication": 0.5, "hidden": 0.9, "on / ideal": 1.05}


DIFFERENCES = [
    ({}, True, True),
    ({"free link after, ms": 1110.0}, False, True),
    ({"free link after, ms": 890.0}, False, True),
    ({"free link after, ms": 1090.0}, True, True),
    ({"communication": 0.44}, False, True),
    ({"communication": 0.56}, False, True),
    ({"hidden": 0.79}, True, False),
    ({"hidden": 1.5}, True, True),
    ({"on / ideal": 1.09}, True, False),
]
"""Differing figures; whether the row is valid, and whether the overlap is sufficient."""


def test_a_row_is_measured_again_for_the_machine_only() -> None:
    for difference, valid, enough in DIFFERENCES:
        row = {**ROW, **difference}
        machine, *overlapped = bars_of(CASE, row)
        assert is_valid(row) == machine.is_met == valid, difference
        assert all(bar.is_met for bar in overlapped) == enough, difference


def test_turns_end_when_the_ratio_is_known_whatever_it_is() -> None:
    """The standard error of (1 + x, 1, 1, 1 - x) is x / 2.45."""
    for ratio in (0.6, 1.0, 1.2):
        for spread, is_enough in ((0.024, True), (0.025, False)):
            on = [ratio * (1.0 + spread), ratio, ratio, ratio * (1.0 - spread)]
            assert is_known(on, [1.0] * 4) == is_enough, (ratio, spread)
            off = [seconds / one for seconds, one in zip((2.0, 3.0, 4.0, 5.0), on, strict=True)]
            assert is_known([2.0, 3.0, 4.0, 5.0], off) == is_enough, "turn by turn"
        for count in (2, 3, 5):
            assert not is_known([ratio] * count, [1.0] * count), "by chance, or not as many turns in each order"
