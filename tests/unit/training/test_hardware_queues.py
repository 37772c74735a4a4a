"""A GPU's streams get a hardware queue each, unless the user has set the number."""

from __future__ import annotations

from megatrain.training.hardware_queues import use_all_queues


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
