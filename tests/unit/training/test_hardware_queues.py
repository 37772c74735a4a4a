"""A GPU's streams get a hardware queue each, unless the user has set the number."""

from __future__ import annotations

import pytest

from megatrain.training.hardware_queues import use_all_queues


@pytest.mark.parametrize(
    ("given", "used", "warns"),
    [(None, "32", False), ("1", "1", True), ("8", "8", True), ("12", "12", False), ("many", "many", False)],
)
def test_number_of_queues(given: str | None, used: str, warns: bool) -> None:
    environment = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    note = use_all_queues(environment)

    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": used}
    assert note.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS={used} makes streams of a GPU wait") is warns
    assert bool(note) is warns
