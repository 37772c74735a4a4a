"""Checks the kernel's log for recent GPU errors: NVIDIA's Xid messages, which later queries of the driver do not show.

The log has them with the time since boot. Without permission to read the log, the check is skipped.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from megatrain.formatting import count_text
from megatrain_job.failures.xids import XidKind, xid_of
from megatrain_launcher.health.context import HealthContext, HealthFinding, failed, passed, skipped, warning
from megatrain_launcher.health.history import HealthHistory

NAMES = ("kernel-log",)
DEADLINE_S = 10.0
RECENT_S = 3600.0
_MAX_BYTES = 32 << 20
_XID = re.compile(rb"NVRM: Xid \((?P<gpu>[^)]*)\):? (?P<number>\d+)(?P<text>.*)")
_LINE = re.compile(rb"\d+,\d+,(?P<since_boot_us>\d+)[^;]*;(?P<text>.*)")
_MAX_NAMED = 3


def check_kernel_log(context: HealthContext, history: HealthHistory) -> tuple[HealthFinding, ...]:
    """Read the kernel's log and judge its Xid messages."""
    del history
    if context.device == "cpu":
        return (skipped(NAMES[0], "runtime.device is cpu"),)
    path = context.places.kernel_log
    try:
        lines = read_kernel_log(path)
    except OSError as error:
        return (skipped(NAMES[0], f"{path} cannot be read ({error.strerror}): Xid errors are not seen"),)
    return (judge_kernel_log(lines, time.clock_gettime(time.CLOCK_MONOTONIC)),)


def read_kernel_log(path: Path) -> list[bytes]:
    """Return the lines of the kernel's log; each read of the device returns one record. Raises: OSError."""
    records: list[bytes] = []
    total = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while total < _MAX_BYTES:
            try:
                raw = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                break
            except BrokenPipeError:  # a record was overwritten before it was read; the next read continues after it
                continue
            if not raw:
                break
            total += len(raw)
            records += raw.splitlines()
    finally:
        os.close(descriptor)
    return records


def judge_kernel_log(lines: Iterable[bytes], now_s: float) -> HealthFinding:
    """Return the finding from the Xid messages. `now_s`: the time since boot.

    A message that a GPU no longer needs recovery cancels the earlier errors of that GPU.
    """
    broken: list[tuple[str, str]] = []
    handled: list[str] = []
    for line in lines:
        record = _LINE.match(line)
        xid = _XID.search(record["text"]) if record else None
        if record is None or xid is None:
            continue
        gpu = xid["gpu"].decode(errors="replace")
        kind = xid_of(int(xid["number"]), xid["text"].decode(errors="replace"))
        age_s = max(0.0, now_s - int(record["since_boot_us"]) / 1e6)
        error_text = f"Xid {kind.number} of GPU {gpu} {age_s:.0f} s ago"
        if kind.kind is XidKind.RECOVERED:
            broken = [(other, error) for other, error in broken if other != gpu]
        elif kind.kind is XidKind.HARDWARE and age_s <= RECENT_S:
            broken.append((gpu, error_text))
        elif kind.kind is XidKind.HANDLED and age_s <= RECENT_S:
            handled.append(error_text)
    if broken:
        named = ", ".join(error for _, error in broken[-_MAX_NAMED:])
        return failed(
            NAMES[0],
            f"{count_text(len(broken), 'hardware error')} within the last hour, the newest: {named}; reset the GPU",
        )
    if handled:
        what = count_text(len(handled), "error")
        return warning(NAMES[0], f"{what} that the GPU driver corrected, the newest: {handled[-1]}")
    return passed(NAMES[0], "no hardware error of a GPU within the last hour")
