"""The kind of device that operations are chosen for: that of the tensors at hand, or the one that is planned for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What a choice among kernels asks of a device. `capability` is (0, 0) where it is no GPU."""

    type: str
    capability: tuple[int, int] = (0, 0)


@cache
def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device that is here."""
    if device.type != "cuda":
        return DeviceKind(device.type)
    return DeviceKind("cuda", torch.cuda.get_device_capability(device))
