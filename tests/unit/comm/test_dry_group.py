"""A group without peers: exchanges have their shapes, and take and give back the memory that they would."""

from __future__ import annotations

import pytest
import torch

from megatrain.comm.dry_group import dry_group
from megatrain.contracts.operations import Operation
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes
from tests.helpers.lone_rank import simulated_group

SIZE = 4


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("device_type", "dtype", "has_wide_sum", "has_parts"),
    [
        ("cpu", torch.float32, False, True),
        ("cuda", torch.float32, True, False),
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.bfloat16, False, False),
    ],
)
def test_where_ranks_exchange_their_parts_what_arrives_is_held_until_it_is_summed(
    device_type: str, dtype: torch.dtype, has_wide_sum: bool, has_parts: bool
) -> None:
    group = dry_group(simulated_group("tp", SIZE, 1), device_type, has_lane=False)
    x = meta(SIZE * 5, 3, dtype=dtype)
    with PeakTensorBytes(on_meta=True).include(x) as memory:
        pending = group.reduce_scatter(x, Operation.TP_REDUCE_SCATTER, has_wide_sum=has_wide_sum)
        assert memory.live_bytes == x.nbytes + x.nbytes // SIZE + x.nbytes * has_parts
        assert pending.wait().shape == (5, 3)
        assert memory.live_bytes == x.nbytes + x.nbytes // SIZE


def test_of_exchanges_that_are_awaited_later_a_cpu_has_two_under_way() -> None:
    group = dry_group(simulated_group("tp", SIZE, 0), "cpu", has_lane=True)
    pieces, outs = [meta(SIZE, 3) for _ in range(4)], [meta(1, 3) for _ in range(4)]
    with PeakTensorBytes(on_meta=True).include(pieces, outs) as memory:
        before = memory.live_bytes
        pending = [
            group.reduce_scatter(piece, Operation.TP_REDUCE_SCATTER, out=out)
            for piece, out in zip(pieces, outs, strict=True)
        ]
        assert memory.live_bytes - before == 2 * pieces[0].nbytes
        pending[2].wait()
        assert memory.live_bytes - before == pieces[0].nbytes
        pending[3].wait()
        assert memory.live_bytes == before


def test_rows_are_joined_and_a_group_of_one_hands_them_back() -> None:
    x = meta(5, 3)
    found = dry_group(simulated_group("tp", SIZE, 0), "cuda", has_lane=False).all_gather(x, Operation.TP_ALL_GATHER)
    alone = dry_group(simulated_group("tp", 1, 0), "cuda", has_lane=False).all_gather(x, Operation.TP_ALL_GATHER)

    assert found.wait().shape == (SIZE * 5, 3)
    assert alone.wait() is x
