"""Copies tensors from the host to the device without making the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`. If x is on the host and the device is not, the host launches the copy and continues.

    Only a copy from pinned memory is asynchronous; any other waits for the work that was launched before it. torch
    keeps the pinned memory until the device has copied it, and reuses it then, so a step allocates none.
    """
    if x.device.type != "cpu" or device.type == "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
