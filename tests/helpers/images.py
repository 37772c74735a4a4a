"""Images of a rank's state in plain memory."""

from __future__ import annotations

from megatrain.checkpoint.image import BoundImage, ImagePlan


def image_of(plan: ImagePlan, fill: int = 0) -> tuple[bytearray, BoundImage]:
    """Return memory for an image, with its envelopes. fill: the value of all bytes before."""
    memory = bytearray([fill]) * plan.num_bytes
    image = BoundImage(plan, memoryview(memory))
    image.write_envelopes()
    return memory, image


def image_bytes(plan: ImagePlan) -> bytes:
    """Return the image of the current state."""
    memory, image = image_of(plan)
    image.copy_out()
    return bytes(memory)
