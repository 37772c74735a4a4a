"""A rank dies or hangs: each surviving rank names its operation, the ranks of the group, and itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.config.config import Config
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.errors import CommunicationError
from megatrain.formatting import ranks_text
from tests.dist.training_jobs import Tables
from tests.helpers.faults import RankFault
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.rank_protocol import FailedRank, RankContext
from tests.helpers.training_case import DEATH_EXIT_CODE, CaseOrders, make_config, on_layout, train_on_rank

LAYOUT = on_layout(2, 2, 2)
WORLD_SIZE = 8
MESSAGE = re.compile(
    r"(?P<operation>[a-z]+(-[a-z]+)+) (number \d+|of chunk \d+, micro-batch \d+ (to|from) rank \d+) "
    r"on group (?P<group>tp|dp|pp|embedding|pp-(forward|backward)(-wrap)?) \(ranks (?P<ranks>[\d, -]+)\) "
    r"failed on rank (?P<rank>\d): (?P<cause>.+)"
)


SEQUENCE_CHUNKS: list[Tables] = [on_layout(2, 1, 2), {"parallel": {"num_sequence_chunks": 4}}]
IN_FLIGHT: dict[str, tuple[list[Tables], Operation, str]] = {
    "reduction-during-backward": ([on_layout(1, 1, 2, 2)], Operation.GRADS_REDUCE_SCATTER, "dp"),
    "gather-during-forward": ([on_layout(1, 1, 2, 2)], Operation.PARAMS_ALL_GATHER, "dp"),
    "sequence-chunk-gathered": (SEQUENCE_CHUNKS, Operation.TP_ALL_GATHER, "tp"),
    "sequence-chunk-scattered": (SEQUENCE_CHUNKS, Operation.TP_REDUCE_SCATTER, "tp"),
    "gradient-between-stages": ([on_layout(1, 2, 2, 2)], Operation.BACKWARD_SEND, "pp"),
}
"""The overlapped exchange in which a rank dies, and the axis of its peers."""


def check_message(rank: int, text: str, config: Config) -> re.Match[str]:
    """Check that the message in `text` names an operation, one of the rank's groups, and the rank."""
    found = MESSAGE.search(text)
    assert found, f"output of rank {rank}: {text}"
    assert int(found["rank"]) == rank
    assert f"ranks {found['ranks']}" == ranks_text(members(rank, found["group"], config))
    return found


def members(rank: int, group: str, config: Config) -> list[int]:
    layout = config.layout(None)
    return list(layout.ranks_along(rank, group if group in layout.axes else "pp"))


def train_until_communication_fails(context: RankContext, config: Config, orders: CaseOrders) -> None:
    """Write the message of the error to the diary and end as a worker does, together with its process and
    connections."""
    try:
        train_on_rank(context, config, orders)
    except CommunicationError as error:
        part = Path(orders.diary, f".{context.rank}")
        part.write_text(str(error))
        part.rename(Path(orders.diary, f"rank-{context.rank}"))
        os._exit(error.exit_code)


def messages_of(
    rank_pool: RankPool, config: Config, orders: CaseOrders
) -> tuple[dict[int, str], tuple[FailedRank, ...]]:
    """Train until communication fails. Return the ranks' messages, by rank, and the exits of their processes."""
    world_size = config.layout(None).world_size
    with pytest.raises(RankError) as caught:
        rank_pool.run(train_until_communication_fails, world_size, config, orders)
    notes = sorted(Path(orders.diary).iterdir())
    return {int(note.name.removeprefix("rank-")): note.read_text() for note in notes}, caught.value.failures


def assert_exit_codes(failures: tuple[FailedRank, ...], dead: int, world_size: int) -> None:
    """Check that all ranks except the dead one end with the exit code of failed communication."""
    codes = {failure.rank: failure.description.rpartition(" ")[2] for failure in failures}
    assert codes == {rank: str(DEATH_EXIT_CODE if rank == dead else 69) for rank in range(world_size)}


@pytest.mark.slow
def test_survivors_of_a_dead_rank_name_operation_group_and_rank(
    rank_pool: RankPool, train_data: Tables, tmp_path: Path
) -> None:
    dead = 5
    config = make_config(train_data, LAYOUT)
    messages, failures = messages_of(rank_pool, config, CaseOrders(die_at=(dead, 2), diary=str(tmp_path)))

    assert sorted(messages) == [rank for rank in range(WORLD_SIZE) if rank != dead]
    for rank, message in messages.items():
        check_message(rank, message, config)
    assert_exit_codes(failures, dead, WORLD_SIZE)


@pytest.mark.slow(kept=["gather-during-forward"])
@pytest.mark.parametrize("case", IN_FLIGHT)
def test_rank_that_dies_in_overlapped_exchanges_is_named(
    case: str, rank_pool: RankPool, train_data: Tables, tmp_path: Path
) -> None:
    changes, operation, axis = IN_FLIGHT[case]
    config = make_config(train_data, {"train": {"steps": 200}}, *changes)
    assert config.parallel.overlap
    layout, dead = config.layout(None), 1
    orders = CaseOrders(die_in=(dead, operation, 11), diary=str(tmp_path))

    messages, failures = messages_of(rank_pool, config, orders)

    assert sorted(messages) == [rank for rank in range(layout.world_size) if rank != dead]
    assert_exit_codes(failures, dead, layout.world_size)
    found = {rank: check_message(rank, message, config) for rank, message in messages.items()}
    for peer in set(layout.ranks_along(dead, axis)) - {dead}:  # The other ranks follow when these have ended.
        assert dead in members(peer, found[peer]["group"], config), messages


@pytest.mark.slow
def test_step_beyond_its_time_limit_fails_on_every_waiting_rank(
    rank_pool: RankPool, train_data: Tables, tmp_path: Path
) -> None:
    blocked = 2
    # The first step has a separate timeout, and so does group creation: only later steps have the short one.
    config = make_config(train_data, LAYOUT, {"runtime": {"step_timeout_s": 1.0}, "train": {"steps": 5}})
    orders = CaseOrders(block_at=(blocked, 3), diary=str(tmp_path))

    messages, _ = messages_of(rank_pool, config, orders)

    assert sorted(messages) == list(range(WORLD_SIZE))
    for rank, message in messages.items():
        check_message(rank, message, config)
    causes = [message for rank, message in messages.items() if rank != blocked]
    assert any("timed out" in cause.lower() or "timeout" in cause.lower() for cause in causes), messages


@pytest.mark.slow
def test_rank_that_dies_in_a_save_fails_that_save(rank_pool: RankPool, train_data: Tables, tmp_path: Path) -> None:
    dead, run_directory, diary = 6, tmp_path / "run", tmp_path / "diary"
    diary.mkdir()
    tables: Tables = {"job": {"run_directory": str(run_directory)}, "checkpoint": {"interval": 2}}
    messages, _ = messages_of(
        rank_pool,
        make_config(train_data, tables, LAYOUT),
        CaseOrders(fault=RankFault(dead, 1, "copy"), diary=str(diary)),
    )

    assert sorted(messages) == [rank for rank in range(WORLD_SIZE) if rank != dead]
    for rank, message in messages.items():
        assert re.match(rf"checkpoint-exchange number \d+ on group host-(tp|dp|pp) .* failed on rank {rank}: ", message)
    assert committed_steps(LocalLocation(run_directory / "checkpoints" / "main")) == []
