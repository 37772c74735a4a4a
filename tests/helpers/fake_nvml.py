"""A libnvidia-ml.so.1 that reports what a test sets: fake_nvml.c, compiled once a session, loaded by NVIDIA's
binding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.helpers.preloaded import compiled
from tests.helpers.require import require_module

HEALTHY: Mapping[str, int] = {
    "temperature": 62, "slowdown_temperature": 89, "sm_clock": 1980, "max_sm_clock": 1980, "memory_clock": 2619,
    "reasons": 0, "power_mw": 612_345, "power_limit_mw": 700_000, "memory_used": 60_000_000_000,
    "memory_total": 85_520_809_984, "utilization": 98, "corrected": 0, "uncorrected": 0, "lifetime_corrected": 3,
    "lifetime_uncorrected": 0, "rows_corrected": 0, "rows_uncorrected": 0, "rows_pending": 0, "rows_failed": 0,
    "pcie_replays": 0, "field.82": 71, "field.38": 0, "field.45": 0, "field.52": 0, "field.59": 0, "field.230": 0,
}  # fmt: skip
"""The library's values for one H100 under load; names as in fake_nvml.c."""


class FakeNvml:
    """The library and its values, below a directory."""

    def __init__(self, directory: Path) -> None:
        self._place = directory / "nvml.txt"
        self._values: dict[str, int] = {}
        self.environment = {
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(
                    None, (str(compiled("fake_nvml.c", "libnvidia-ml.so.1").parent), os.environ.get("LD_LIBRARY_PATH"))
                )
            ),
            "FAKE_NVML": str(self._place),
        }

    def say(self, about: Mapping[int, Mapping[str, int]] | None = None, **more: int) -> None:
        """Change values of GPUs (`about`) and of the library (`more`); all others stay. xid_0 stands for xid.0."""
        self._values |= {
            f"{gpu}.{what}": value for gpu, values in (about or {}).items() for what, value in values.items()
        }
        self._values |= {
            name.replace("_", ".") if name.startswith("xid") else name: value for name, value in more.items()
        }
        draft = self._place.with_suffix(".new")
        draft.write_text("".join(f"{name} {value}\n" for name, value in self._values.items()))
        draft.replace(self._place)


def fake_nvml(directory: Path, num_gpus: int = 2) -> FakeNvml:
    """Return a library that reports `num_gpus` healthy GPUs."""
    require_module("pynvml")
    found = FakeNvml(directory)
    found.say(dict.fromkeys(range(num_gpus), HEALTHY), gpus=num_gpus)
    return found
