"""Cuts a log into lines without terminal control codes, and finds the writer of a line.

A carriage return also ends a line, because progress bars write one endless line. Long lines are cut at multiples of
MAX_LINE_BYTES from their start, so that the result does not depend on the chunks in which a log arrives.
"""

from __future__ import annotations

import re
from typing import Final

MAX_LINE_BYTES: Final = 16 * 1024
"""Longer than any message that a rule matches; shorter than a dump of tensors on one line."""

_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")

_OTHER_RANKS = re.compile(
    r"\bEDAC\b|\bDIMM|mcelog|\bcsrow|\bCPU_SrcID|\bIPMI|\bbank[ :=#_]*\d|"
    r"\braid|megaraid|\bmdadm|\bmegasas|"
    r"\bslurm(?:ctld|d|dbd|stepd)\b|\b(?:sched|select|priority|topology)/\w+: |\bnode rank\b|\bhydra\b",
    re.IGNORECASE,
)
"""Lines in which "rank 3" is a part of a memory module, a disk of an array, or a position in a scheduler's order."""
_RANK_IN_TEXT = re.compile(r"\brank[ =:]+(\d+)\b", re.IGNORECASE)
_RANK = (
    re.compile(r"\[rank ?:?(\d+)\]", re.IGNORECASE),
    re.compile(r"^\[(?:\d+,)?(\d+)\]<std"),  # horovodrun, mpirun --tag-output
    re.compile(r"^ *(\d+): "),  # srun --label
    re.compile(r"^\[[a-z]+(\d+)\]:"),  # torchrun --tee
    _RANK_IN_TEXT,
)
_HOST = (
    re.compile(r"^(?:\[\S+\] |<\d+>)?\w{3} +\d+ [\d:]{8} ([\w.-]+) \S+:"),  # syslog
    re.compile(r"^\S*T[\d:.,+-]+Z? ([A-Za-z][\w.-]*) kernel:"),
    re.compile(r"(?:^|\s)([A-Za-z][\w.-]*):\d+:\d+ \[-?\d+\]"),  # NCCL
    re.compile(r"srun: error: ([\w.-]+): "),
)
_PREFIX = re.compile(
    r"\s+|"
    r"\[[^\[\]]{1,120}\]:?|"  # [rank3]: [ERROR] [2026-01-02 03:04:05] [E602 03:04:05 file.cpp:7]
    r"\([^()]{1,120}\)|"  # (Actor pid=1, ip=10.0.0.1)
    r"<(?:std(?:err|out)|\d+)>:?|"
    r"\d+: |"  # srun --label
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*(?: std(?:err|out) F)?|"
    r"\w{3} +\d+ \d\d:\d\d:\d\d|"
    r"(?:ERROR|CRITICAL|FATAL|SEVERE)\b[ :|-]*|"
    r"[|:-] |"
    r"[A-Za-z][\w.-]*:\d+:\d+ \[-?\d+\]|"
    r"[a-z][\w.-]*\d[\w.-]*(?<![Ee]rror)(?<!xception): |"  # a pod or a host
    r"[A-Za-z_][\w.]*\.(?!\w*error: |timeout: )[a-z_]\w*: |"  # the name of a logger
    r"[a-z][\w-]*: (?=(?:[A-Z][\w.]*)?(?:Error|Exception)\b)"  # the name of a program
)
_MAX_PREFIXES = 16


class LineCutter:
    """Cuts chunks of bytes into complete lines, and keeps the incomplete last one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return all lines that are now complete as one block, without escape sequences."""
        if self._rest:
            chunk = self._rest + chunk
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        block, self._rest = chunk[:cut], chunk[cut:]
        if len(self._rest) >= MAX_LINE_BYTES:
            whole = len(self._rest) // MAX_LINE_BYTES * MAX_LINE_BYTES
            block, self._rest = block + self._rest[:whole] + b"\n", self._rest[whole:]
        return clean(block)

    def finish(self) -> bytes:
        """Return the last line, which has no newline."""
        block, self._rest = self._rest, b""
        return clean(block)


def clean(block: bytes) -> bytes:
    """Return the block with its long lines cut and without terminal control codes."""
    if len(block) > MAX_LINE_BYTES and max(map(len, block.splitlines())) > MAX_LINE_BYTES:
        block = b"\n".join(
            line[start : start + MAX_LINE_BYTES]
            for line in block.splitlines()
            for start in range(0, max(1, len(line)), MAX_LINE_BYTES)
        )
    return _ESCAPE.sub(b"", block) if b"\x1b" in block else block


def rank_of_line(line: str) -> str | None:
    """Return the rank that wrote a line, from the prefixes that launchers and torch add; None if unknown."""
    for pattern in _RANK:
        found = pattern.search(line)
        if found is not None:
            return None if pattern is _RANK_IN_TEXT and _OTHER_RANKS.search(line) else found[1]
    return None


def host_of_line(line: str) -> str | None:
    """Return the host that wrote a line; None if unknown."""
    for pattern in _HOST:
        found = pattern.search(line)
        if found is not None:
            return found[1]
    return None


def message_start(line: str) -> int:
    """Return where a line's message begins: after prefixes such as ranks, times, hosts and log levels."""
    start = 0
    for _ in range(_MAX_PREFIXES):
        found = _PREFIX.match(line, start)
        if found is None:
            break
        start = found.end()
    return start
