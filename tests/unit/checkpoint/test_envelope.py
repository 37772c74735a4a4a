"""Prefix, data and suffix equal what torch.save writes, and are created without the data."""

from __future__ import annotations

import io
import math
import tracemalloc

import pytest
import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from megatrain.checkpoint.envelope import envelope

SHAPES = [(), (1,), (5,), (16,), (3, 0), (0,), (7, 3), (1, 1, 7), (2, 3, 4, 5), (1000, 33)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def some_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).view(shape) * 1.37
    return values.to(dtype)


def data_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def saved_by_torch(tensor: Tensor) -> bytes:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        sink = io.BytesIO()
        torch.save(tensor, sink)
        return sink.getvalue()
    finally:
        set_crc32_options(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_torch_save_and_torch_loads_them(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = some_tensor(shape, dtype)
        around = envelope(shape, dtype)
        whole = around.prefix + data_of(tensor) + around.suffix

        assert whole == saved_by_torch(tensor), shape
        assert len(whole) == around.num_bytes, shape
        assert around.num_data_bytes == tensor.nbytes, shape
        assert around.data_offset % 64 == 0, shape

        loaded = torch.load(io.BytesIO(whole), weights_only=True)
        assert (loaded.dtype, loaded.stride()) == (dtype, tensor.stride()), shape
        assert torch.equal(loaded, tensor), shape


def test_torch_maps_it(tmp_path) -> None:
    """Data that torch maps instead of reading must be at the offset that torch computes."""
    tensor = some_tensor((1000, 33), torch.float32)
    around = envelope((1000, 33), torch.float32)
    (tmp_path / "item.pt").write_bytes(around.prefix + data_of(tensor) + around.suffix)

    assert torch.equal(torch.load(tmp_path / "item.pt", mmap=True, weights_only=True), tensor)


def test_data_is_neither_held_nor_written() -> None:
    shape = (64 << 20 >> 2,)
    envelope.cache_clear()
    tracemalloc.start()
    around = envelope(shape, torch.float32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert around.num_data_bytes == 64 << 20
    assert len(around.prefix) + len(around.suffix) < 4096
    assert peak < 1 << 20


def test_envelope_is_cached_and_leaves_the_settings_of_torch() -> None:
    assert get_crc32_options()
    envelope.cache_clear()
    before = envelope((11,), torch.float32)
    assert get_crc32_options()
    assert envelope((11,), torch.float32) is before
    envelope.cache_clear()
    with torch.device("meta"):
        assert envelope((11,), torch.float32) == before
