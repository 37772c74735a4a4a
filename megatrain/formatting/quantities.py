"""Format counts, sizes, durations and times for people."""

from __future__ import annotations

from datetime import UTC, datetime


def count_text(number: int, one: str, many: str = "") -> str:
    """Return "1 host" or "1,250 hosts"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def bytes_text(num_bytes: int) -> str:
    """Return "1.23 GB". Units are powers of 1000, like those of disks."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{num_bytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} PB"


def seconds_text(seconds: float) -> str:
    """Return a duration: "80 ms", "3.2 s", "12 min", "3 h 12 min"."""
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, hours, days = round(seconds / 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes} min"
    return f"{hours} h {int(seconds // 60) % 60} min" if hours < 48 else f"{days} d {hours % 24} h"


def age_text(unix_s: float, now_s: float) -> str:
    """Return how long ago a moment was, in whole seconds: "3 s", "12 min"."""
    age_s = max(0.0, now_s - unix_s)
    return f"{age_s:.0f} s" if age_s < 59.5 else seconds_text(age_s)


def time_text(unix_s: float) -> str:
    """Return a moment as UTC."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # the time is out of range, as from a host with a wrong clock
        return f"{unix_s:.0f} s after 1970"
