"""Every collective of a group, and both ends of a channel: the result, the record, and the content of an error."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.comm.gloo import GlooCommunicator
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.errors import CommunicationError
from megatrain.contracts.layout import Layout
from megatrain.telemetry.recorder import open_recorder
from tests.helpers.black_boxes import boxes_by_rank, spans
from tests.helpers.joined_mesh import joined_mesh
from tests.helpers.rank_pool import RankPool
from tests.helpers.rank_protocol import RankContext
from tests.helpers.single_rank import SilentRecorder

SIZE = 3
CPU = torch.device("cpu")
EXCHANGE = Operation.CHECKPOINT_EXCHANGE


COUNTS = [[1, 2, 0], [1, 0, 3], [2, 1, 1]]
"""The numbers of an all-to-all that each rank (row) sends to each rank (column)."""


@dataclass(slots=True)
class Answers:
    """The results of one rank, as lists."""

    results: dict[str, Any] = field(default_factory=dict)
    has_waited: bool = False
    num_calls: int = 0
    timeouts: list[float] = field(default_factory=list)
    error: str = ""


def own(rank: int) -> Tensor:
    """Return a rank's input: each maximum is from another rank, and no rank's input equals the sum."""
    return torch.tensor([[rank, -rank], [10.0 * (rank == 1), 7.0]], dtype=torch.float64)


def sent_by(rank: int) -> Tensor:
    """Return a rank's input of an all-to-all; all ranks have different numbers."""
    return 100.0 * rank + torch.arange(sum(COUNTS[rank]), dtype=torch.float64)


def exchange(context: RankContext, boxes: str) -> Answers:
    layout, rank, answers = Layout(dp_size=SIZE), context.rank, Answers()
    identity = Identity("collectives", "main", 0, rank, layout, os.getpid(), "host")
    mesh = joined_mesh(context, layout, open_recorder(identity, directory=boxes, run_key="key", num_records=256))
    dp, results = mesh.replicas, answers.results
    results["sum"] = dp.all_reduce(own(rank), Operation.DP_ALL_REDUCE).wait().tolist()
    results["maximum"] = dp.all_reduce(own(rank), Operation.DP_ALL_REDUCE, maximum=True).wait().tolist()
    results["gathered rows"] = dp.all_gather(own(rank), Operation.PARAMS_ALL_GATHER).wait().tolist()
    rows = torch.arange(SIZE * 2.0)[:, None] * (rank + 1)
    results["scattered"] = dp.reduce_scatter(rows, Operation.GRADS_REDUCE_SCATTER).wait().tolist()
    sent, received = COUNTS[rank], [of_peer[rank] for of_peer in COUNTS]
    results["parts"] = dp.all_to_all(sent_by(rank), Operation.UPDATES_ALL_TO_ALL, sent, received).wait().tolist()
    results["broadcast"] = dp.broadcast(own(rank), EXCHANGE, source=1).wait().tolist()
    gathered = dp.gather(own(rank), EXCHANGE)
    results["gathered"] = None if gathered is None else [one.tolist() for one in gathered]
    answers.num_calls = dp.num_calls

    pending = dp.all_reduce(own(rank), Operation.DP_ALL_REDUCE)
    pending.wait()
    answers.has_waited = pending.is_done()

    mesh.set_timeout(17.0)
    communicators = [one for group in mesh.groups if isinstance(one := group.communicator, GlooCommunicator)]
    answers.timeouts = [
        communicator.process_group._get_backend(CPU).options._timeout.total_seconds() for communicator in communicators
    ]
    try:  # a dtype that cannot be sent
        dp.all_reduce(torch.empty(1, dtype=torch.int16), Operation.DP_ALL_REDUCE).wait()
    except CommunicationError as error:
        answers.error = str(error)
    return answers


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("boxes")


@pytest.fixture(scope="module")
def answers(rank_pool: RankPool, boxes: Path) -> list[Answers]:
    return rank_pool.run(exchange, SIZE, str(boxes))


def test_every_rank_gets_the_results_of_collectives(answers: list[Answers]) -> None:
    each = [own(rank).tolist() for rank in range(SIZE)]
    parts = [sent_by(rank).split(COUNTS[rank]) for rank in range(SIZE)]
    scattered = [[[6.0 * row] for row in rows] for rows in ((0, 1), (2, 3), (4, 5))]
    for rank, answer in enumerate(answers):
        assert answer.results == {
            "sum": [[3.0, -3.0], [10.0, 21.0]],
            "maximum": [[2.0, 0.0], [10.0, 7.0]],
            "gathered rows": [row for rows in each for row in rows],
            "scattered": scattered[rank],
            "parts": torch.cat([of_peer[rank] for of_peer in parts]).tolist(),
            "broadcast": each[1],
            "gathered": each if rank == 0 else None,
        }
        assert answer.has_waited


def test_every_exchange_is_recorded_with_bytes_and_end(answers: list[Answers], boxes: Path) -> None:
    for rank, box in boxes_by_rank(boxes).items():
        # The bytes that the rank sends: four numbers of 8 bytes, six of 4.
        expected = [
            (Operation.DP_ALL_REDUCE, [32, 32, 32]),
            (Operation.PARAMS_ALL_GATHER, [32]),
            (Operation.GRADS_REDUCE_SCATTER, [24]),
            (Operation.UPDATES_ALL_TO_ALL, [8 * sum(COUNTS[rank])]),
            (EXCHANGE, [32, 32]),
        ]
        (dp,) = (group for group in box.groups.values() if group.name == "dp")
        for operation, sizes in expected:
            found = [span for span in spans(box, operation) if not span.is_in_flight]
            assert [span.num_bytes for span in found] == sizes, (rank, operation)
            assert {span.group for span in found} == {dp.number}
        # A failed exchange stays open, as the last one that was begun.
        assert [span.operation for span in box.in_flight] == [Operation.DP_ALL_REDUCE]
        assert (dp.entered, dp.left, list(dp.ranks)) == (9, 8, list(range(SIZE)))


def test_error_has_the_number_of_the_failed_exchange(answers: list[Answers]) -> None:
    for rank, answer in enumerate(answers):
        assert answer.num_calls == 7
        place = f"dp-all-reduce number 9 on group dp (ranks 0-2) failed on rank {rank}: "
        assert answer.error.startswith(place)
        assert "an exchange of this phase may take 17 s" in answer.error


def test_timeout_is_set_for_every_group(answers: list[Answers]) -> None:
    for answer in answers:
        # dp, and the same group on CPU memory
        assert answer.timeouts == [17.0] * 2


def channels_of(context: RankContext, layout: Layout, has_wrap_links: bool) -> tuple[list[str], bool, bool]:
    links = joined_mesh(context, layout, SilentRecorder(), has_wrap_links=has_wrap_links).links
    assert links is not None
    channels = (links.forward_to_next, links.forward_from_previous, links.backward_to_previous,
                links.backward_from_next)  # fmt: skip
    forward, backward = channels[:2], channels[2:]
    return (
        [channel.group.name for channel in channels],
        forward[0].group is forward[1].group,
        backward[0].group is backward[1].group,
    )


def test_two_stages_have_separate_wrap_links(rank_pool: RankPool) -> None:
    layout = Layout(pp_size=2)
    first, last = rank_pool.run(channels_of, 2, layout, True)
    plain = rank_pool.run(channels_of, 2, layout, False)

    assert first == (["pp-forward", "pp-forward-wrap", "pp-backward-wrap", "pp-backward"], False, False)
    assert last == (["pp-forward-wrap", "pp-forward", "pp-backward", "pp-backward-wrap"], False, False)
    assert plain == [(["pp-forward", "pp-forward", "pp-backward", "pp-backward"], True, True)] * 2


def test_three_stages_need_no_wrap_links(rank_pool: RankPool) -> None:
    names = ["pp-forward", "pp-forward", "pp-backward", "pp-backward"]
    assert rank_pool.run(channels_of, 3, Layout(pp_size=3), True) == [(names, True, True)] * 3


def reduce_half_precision(context: RankContext) -> list[float]:
    """Sum bf16 into the rank's own slice, as buckets do. Sums that are rounded to bf16 would lose the small addends."""
    rank = context.rank
    x = torch.full((SIZE * 2,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    own_slice = x[2 * rank : 2 * rank + 2]
    dp = joined_mesh(context, Layout(dp_size=SIZE), SilentRecorder()).replicas
    reduced = dp.reduce_scatter(x, Operation.GRADS_REDUCE_SCATTER, out=own_slice, sums_in_fp32=True).wait()
    assert reduced is own_slice
    halves = torch.full((SIZE,), 256.0 if rank == 0 else 0.5, dtype=torch.bfloat16)
    wide = dp.reduce_scatter(halves, Operation.GRADS_REDUCE_SCATTER, out=torch.empty(1), sums_in_fp32=True).wait()
    return [*reduced.tolist(), *wide.tolist()]


def test_half_precision_sums_are_rounded_at_most_once(rank_pool: RankPool) -> None:
    # 256 + 1 is not a bf16 number and would be rounded to 256; 258 is one, and 257 is an fp32 number.
    assert rank_pool.run(reduce_half_precision, SIZE) == [[258.0, 258.0, 257.0]] * SIZE
