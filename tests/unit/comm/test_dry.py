"""Dry groups without peers: results have the right shapes, and allocate and free the memory of real exchanges."""

from __future__ import annotations

import pytest
import torch

from megatrain.comm import dry_mesh
from megatrain.comm.group import Group
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.layout import Layout
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes

SIZE = 4


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dry(axis: str, size: int, rank: int, device_type: str, *, has_sequence_chunks: bool = False) -> Group:
    layout = Layout(**{f"{axis}_size": size})
    with dry_mesh(layout, rank, device_type=device_type, has_sequence_chunks=has_sequence_chunks) as mesh:
        return mesh.along[axis]


@pytest.mark.parametrize(
    ("device_type", "dtype", "sums_in_fp32", "has_parts"),
    [
        ("cpu", torch.float32, False, True),
        ("cuda", torch.float32, True, False),
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.bfloat16, False, False),
    ],
)
def test_received_parts_are_held_until_they_are_summed(
    device_type: str, dtype: torch.dtype, sums_in_fp32: bool, has_parts: bool
) -> None:
    group = dry("tp", SIZE, 1, device_type)
    x = meta(SIZE * 5, 3, dtype=dtype)
    with PeakTensorBytes(on_meta=True).include(x) as memory:
        pending = group.reduce_scatter(x, Operation.TP_REDUCE_SCATTER, sums_in_fp32=sums_in_fp32)
        assert memory.live_bytes == x.nbytes + x.nbytes // SIZE + x.nbytes * has_parts
        assert pending.wait().shape == (5, 3)
        assert memory.live_bytes == x.nbytes + x.nbytes // SIZE


def test_sent_tensor_is_held_until_the_exchange_is_awaited() -> None:
    group = dry("tp", SIZE, 0, "cuda")
    with PeakTensorBytes(on_meta=True) as memory:
        x = meta(SIZE * 5, 3)
        num_bytes = x.nbytes
        pending = group.reduce_scatter(x, Operation.TP_REDUCE_SCATTER)
        del x
        assert memory.live_bytes == num_bytes + num_bytes // SIZE
        pending.wait()
        assert memory.live_bytes == num_bytes // SIZE


def test_cpu_carries_out_two_exchanges_at_a_time() -> None:
    group = dry("tp", SIZE, 0, "cpu", has_sequence_chunks=True)
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


def test_rows_are_joined_and_a_group_of_one_returns_them() -> None:
    x = meta(5, 3)
    found = dry("tp", SIZE, 0, "cuda").all_gather(x, Operation.TP_ALL_GATHER)
    alone = dry("tp", 1, 0, "cuda").all_gather(x, Operation.TP_ALL_GATHER)

    parts = dry("tp", SIZE, 0, "cuda").all_to_all(meta(7), Operation.UPDATES_ALL_TO_ALL, [1, 0, 4, 2], [0, 0, 3, 2])

    assert found.wait().shape == (SIZE * 5, 3)
    assert parts.wait().shape == (5,)
    assert alone.wait() is x
