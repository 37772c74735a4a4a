"""Which GPU each local rank has, by its UUID: the key that joins our metrics with those of NVIDIA's DCGM exporter.

Read from the driver's files in /proc, without loading a library: a worker takes the device of its local rank, which
CUDA counts by PCI address, among those that CUDA_VISIBLE_DEVICES leaves. A rank on a MIG device has that device's GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

DRIVER_FILES = Path("/proc/driver/nvidia/gpus")
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)\s*$", re.MULTILINE)
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-fA-F-]+)/\d+/\d+")


def driver_uuids(directory: Path = DRIVER_FILES) -> tuple[str, ...]:
    """Return the UUIDs of a host's GPUs by PCI address; none where there is no GPU, or they are unknown."""
    found = []
    for path in sorted(directory.glob("*/information")):
        try:
            match = _UUID.search(path.read_text(errors="replace"))
        except OSError:
            return ()
        found.append(match[1] if match else "")
    return tuple(found)


def gpu_uuids(visible: str | None, found: Sequence[str], mig: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the UUIDs by local rank.

    `visible`: the value of CUDA_VISIBLE_DEVICES, None where that is not set; `found`: the host's GPUs by PCI address;
    `mig`: UUID of a MIG device -> UUID of its GPU.
    """
    if visible is None:
        return tuple(found)
    chosen = []
    for word in filter(None, (part.strip() for part in visible.split(","))):
        if word.isascii() and word.isdigit() and int(word) < len(found):
            chosen.append(found[int(word)])
        elif word.startswith("GPU-"):
            # a prefix of a UUID is allowed
            chosen.append(next((uuid for uuid in found if uuid.startswith(word)), ""))
        elif old := _OLD_MIG.fullmatch(word):
            chosen.append(old[1])
        elif word.startswith("MIG-"):
            chosen.append((mig or {}).get(word, ""))
        else:
            break  # CUDA ignores the devices after one that does not exist
    return tuple(chosen)
