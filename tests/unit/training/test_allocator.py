"""torch's allocator is set up for growing segments, unless the user has settings of their own."""

from __future__ import annotations

import pytest

from megatrain.training.allocator import (
    ALLOCATOR_VARIABLES,
    EXPANDABLE_SEGMENTS,
    set_allocator,
    use_expandable_segments,
)


def test_segments_grow_unless_the_user_says_otherwise() -> None:
    given: list[str] = []
    assert use_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": ""}, given.append) == ""
    assert given == [EXPANDABLE_SEGMENTS]
    for name in ALLOCATOR_VARIABLES:
        reported = use_expandable_segments({name: "backend:cudaMallocAsync"}, given.append)
        assert reported == f"torch's allocator has the settings of {name}=backend:cudaMallocAsync"
    assert given == [EXPANDABLE_SEGMENTS]


def test_torch_accepts_the_allocator_settings() -> None:
    set_allocator(EXPANDABLE_SEGMENTS)
    with pytest.raises((RuntimeError, ValueError), match="perhaps"):
        set_allocator("expandable_segments:perhaps")
