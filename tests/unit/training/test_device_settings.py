"""Settings before a GPU is used: growing segments and a hardware queue per stream, unless the user has set them."""

from __future__ import annotations

import pytest

from megatrain.training.device_settings import (
    ALLOCATOR_VARIABLES,
    EXPANDABLE_SEGMENTS,
    set_allocator,
    use_all_queues,
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


def test_number_of_queues_is_set_unless_the_user_set_it() -> None:
    for given, used, warns in (
        (None, "32", False),
        ("1", "1", True),
        ("8", "8", True),
        ("12", "12", False),
        ("many", "many", False),
    ):
        environment = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
        note = use_all_queues(environment)
        assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": used}
        assert note.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS={used} makes streams of a GPU wait") is warns, given
        assert bool(note) is warns, given
