"""The kind of device that operations are chosen for: the device of the tensors, or the device that is planned for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What the choice of kernels depends on. `capability` is (0, 0) if the device is not a GPU."""

    type: str
    capability: tuple[int, int] = (0, 0)


@cache
def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device of this machine."""
    if device.type != "cuda":
        return DeviceKind(device.type)
    return DeviceKind("cuda", torch.cuda.get_device_capability(device))
