"""Reads recent GPU errors from the kernel's log: NVIDIA's Xid messages, which later queries of the driver do not show.

The log has these messages with the time since boot. Without permission to read the log, the check is skipped, and a
hang is judged without these errors.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.contracts.records.host_records import GpuErrorRecord
from megatrain.formatting import count_text
from megatrain_job.failures.xids import Xid, XidKind, xid_of
from megatrain_launcher.health.context import HealthContext, HealthFinding, failed, passed, skipped, warning
from megatrain_launcher.health.history import HealthHistory

NAMES = ("kernel-log",)
DEADLINE_S = 10.0
RECENT_S = 3600.0
_MAX_BYTES = 32 << 20
_XID = re.compile(rb"NVRM: Xid \((?P<gpu>[^)]*)\):? (?P<number>\d+)(?P<text>.*)")
_LINE = re.compile(rb"\d+,\d+,(?P<since_boot_us>\d+)[^;]*;(?P<text>.*)")
_MAX_NAMED = 3
_MAX_KEPT = 32
"""The most errors that are kept for all GPUs of a host together: a broken GPU repeats the same few numbers."""
_MAX_TEXT = 120


@dataclass(frozen=True, slots=True)
class XidMessage:
    """A message of the GPU driver. `text`: what follows the number. `age_s`: the time since the message."""

    gpu: str
    text: str
    age_s: float
    xid: Xid


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
    """Return the lines of the kernel's log; path: the device, or a file with a copy of it. Raises: OSError.

    Each read of the device returns one record. Of a file, only the last _MAX_BYTES are read.
    """
    parts: list[bytes] = []
    total = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if (size := os.fstat(descriptor).st_size) > _MAX_BYTES:  # of a device it is 0
            os.lseek(descriptor, size - _MAX_BYTES, os.SEEK_SET)
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
            parts.append(raw)
    finally:
        os.close(descriptor)
    return b"".join(parts).splitlines()


def xid_messages(lines: Iterable[bytes], now_s: float) -> Iterator[XidMessage]:
    """Yield the messages of the GPU driver in lines of the kernel's log. `now_s`: the time since boot.

    A copy of the log may have messages of an earlier boot, whose times are wrong now. Those that are more than RECENT_S
    ahead are left out. Times that are less ahead count as now, because the log's clock drifts.
    """
    for line in lines:
        record = _LINE.match(line)
        found = _XID.search(record["text"]) if record else None
        if record is not None and found is not None:
            text = found["text"].decode(errors="replace")
            age_s = now_s - int(record["since_boot_us"]) / 1e6
            if age_s < -RECENT_S:
                continue
            gpu = found["gpu"].decode(errors="replace")
            yield XidMessage(gpu, text, max(0.0, age_s), xid_of(int(found["number"]), text))


def recent_gpu_errors(path: Path) -> tuple[GpuErrorRecord, ...]:
    """Return the errors of the last hour in the kernel's log; empty if it cannot be read."""
    try:
        lines = read_kernel_log(path)
    except OSError:
        return ()
    return gpu_error_records(lines, time.clock_gettime(time.CLOCK_MONOTONIC))


def gpu_error_records(lines: Iterable[bytes], now_s: float) -> tuple[GpuErrorRecord, ...]:
    """Return the errors within RECENT_S, oldest first; of each GPU and number, the newest.

    `now_s`: the time since boot. Errors of a GPU before a message that it needs no recovery any more are left out.
    """
    found: dict[tuple[str, int], GpuErrorRecord] = {}
    for message in xid_messages(lines, now_s):
        if message.xid.kind is XidKind.RECOVERED:
            found = {key: error for key, error in found.items() if key[0] != message.gpu}
        elif message.age_s <= RECENT_S:
            number = message.xid.number
            error = GpuErrorRecord(message.gpu, number, message.text[:_MAX_TEXT], message.age_s)
            found.pop((message.gpu, number), None)
            found[message.gpu, number] = error
    return tuple(found.values())[-_MAX_KEPT:]


def judge_kernel_log(lines: Iterable[bytes], now_s: float) -> HealthFinding:
    """Return the finding from the Xid messages. `now_s`: the time since boot.

    A message that a GPU no longer needs recovery cancels the earlier errors of that GPU.
    """
    broken: list[tuple[str, str]] = []
    handled: list[str] = []
    for message in xid_messages(lines, now_s):
        kind, gpu, is_recent = message.xid.kind, message.gpu, message.age_s <= RECENT_S
        error_text = f"Xid {message.xid.number} of GPU {gpu} {message.age_s:.0f} s ago"
        if kind is XidKind.RECOVERED:
            broken = [(other, error) for other, error in broken if other != gpu]
        elif kind is XidKind.HARDWARE and is_recent:
            broken.append((gpu, error_text))
        elif kind is XidKind.HANDLED and is_recent:
            handled.append(error_text)
    if broken:
        named = ", ".join(error for _, error in broken[-_MAX_NAMED:])
        return failed(
            NAMES[0],
            f"{count_text(len(broken), 'hardware error')} within the last hour, the newest: {named}; reset the GPU",
        )
    if handled:
        what = count_text(len(handled), "error")
        return warning(NAMES[0], f"{what} that the GPU driver handled, the newest: {handled[-1]}")
    return passed(NAMES[0], "no hardware error of a GPU within the last hour")
