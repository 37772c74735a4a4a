"""Copies of host memory are exact at every length and place, compiled or not."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.checkpoint import image
from megatrain.checkpoint.image import copy_bytes, streamed_copy
from tests.helpers.require import require

PLACES = st.integers(0, 200)
GUARD = 0xA5


def test_the_compiled_copy_is_here() -> None:
    copy = streamed_copy()
    require("compiler", copy is not None, "there was none when megatrain was installed")
    assert callable(copy)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    num_bytes=st.integers(0, 4096) | st.integers((256 << 10) - 70, (256 << 10) + 70),
    to=PLACES,
    source_at=PLACES,
    is_compiled=st.booleans(),
)
def test_exactly_the_bytes_that_were_asked_for(num_bytes: int, to: int, source_at: int, is_compiled: bool) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, source_at + num_bytes, dtype=np.uint8)[source_at:]
    memory = np.full(to + num_bytes + 200, GUARD, dtype=np.uint8)
    target = memory[to : to + num_bytes]
    stream = streamed_copy()
    if is_compiled and stream is not None:
        stream(target.ctypes.data, source.ctypes.data, num_bytes)
    else:
        copy_bytes(target, source)
    assert np.array_equal(target, source)
    assert (memory[:to] == GUARD).all()
    assert (memory[to + num_bytes :] == GUARD).all()


@pytest.mark.parametrize("origin", [None, "/nonexistent/_host_copy.so", __file__])
def test_without_what_is_compiled_numpy_copies(monkeypatch: pytest.MonkeyPatch, origin: str | None) -> None:
    spec = None if origin is None else importlib.util.spec_from_file_location("megatrain._host_copy", origin)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(image, "streamed_copy", image.streamed_copy.__wrapped__)
    source = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
    target = np.zeros_like(source)
    assert image.streamed_copy() is None
    copy_bytes(target, source)
    assert np.array_equal(target, source)
