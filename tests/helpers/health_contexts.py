"""The context of health checks of one host on an invented machine: /proc, /sys and the kernel's log are in a directory
of the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain_launcher.health.context import HealthContext, Places


def health_context(root: Path, **changes: Any) -> HealthContext:
    """Return a context with everything below `root`, and with changes."""
    fields: dict[str, Any] = {
        "host": "h", "session": "s", "run_directory": root, "num_workers": 1, "history": root / "h.json",
        "places": Places(proc=root / "proc", sys=root / "sys", kernel_log=root / "kmsg"),
    }  # fmt: skip
    return HealthContext(**{**fields, **changes})
