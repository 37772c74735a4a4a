"""Small files of the kernel, in /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def system_text(path: Path) -> str:
    """Return a file's text, stripped; empty if the file is absent, or the kernel has no value for it."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
