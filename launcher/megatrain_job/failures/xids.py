"""NVIDIA's Xid numbers: what each means for the host, and what to do. The only table of them, from NVIDIA's catalog.

For some numbers the text of the message decides: 144 to 150 have nonfatal variants, and 154 can report a change to
"None". `VARIANTS` has these. Where only the number is known (DCGM, NVML), `XIDS` alone is used.

Log classification, the check of the kernel's log, the health of a job, the page and docs/runbooks/gpu-errors.md use the
table. An unlisted number counts as an error of the GPU, its links or its firmware: keeping such a host in a job
costs more than examining it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class XidKind(StrEnum):
    """The origin of the error."""

    PROGRAM = "program"
    """A program can cause the error without a hardware fault."""
    CLEAN_UP = "clean-up"
    """The GPU driver ends a program's channels after another error."""
    HANDLED = "mended"
    """A hardware error that the GPU driver handled: a row remapped, an error corrected or limited to one program."""
    HARDWARE = "hardware"
    RECOVERED = "healthy again"
    """No error: the GPU driver reports that a GPU needs no recovery any more."""


@dataclass(frozen=True, slots=True)
class Xid:
    """An Xid number and its meaning."""

    number: int
    meaning: str
    kind: XidKind
    advice: str


_ADVICE = {
    XidKind.PROGRAM: "check the program; evict the host if the error recurs there",
    XidKind.CLEAN_UP: "look at the errors before it",
    XidKind.HANDLED: "reset the GPU when the host is free; evict the host if the error recurs often",
    XidKind.HARDWARE: "evict the host and reset the GPU; replace the GPU if the error recurs",
    XidKind.RECOVERED: "nothing",
}
_ENGINE = "an engine of the GPU raised an exception"
_LINK = "NVLink: a link error"
_UNNAMED = "not in the catalog of this version"
_KINDS: dict[XidKind, dict[int, str]] = {
    XidKind.PROGRAM: {
        6: "invalid push buffer",
        7: "invalid address in a push buffer",
        8: "the GPU stopped processing",
        11: "invalid or corrupted push buffer",
        12: "the GPU driver handled an exception of the graphics engine",
        13: "exception of the graphics engine: for example an access that is not allowed",
        **dict.fromkeys((24, 25, 26, 27, 28, 29, 30), "the GPU driver received invalid input"),
        31: "memory page fault: an address that is not mapped",
        32: "invalid or corrupted push buffer",
        **dict.fromkeys((33, 34, 35, 36, 37, 38, 39, 40, 41, 42), _ENGINE),
        43: "the GPU stopped processing the program's work",
        44: "fault of the graphics engine",
        **dict.fromkeys((46, 47, 59), "the GPU stopped processing"),
        **dict.fromkeys((67, 68, 69, 70, 75, 76, 86), _ENGINE),
        109: "a context switch took too long",
    },
    XidKind.CLEAN_UP: {45: "the GPU driver ends a program's channels"},
    XidKind.HANDLED: {
        63: "a row of memory was marked for remapping, or a page retired",
        92: "many corrected memory errors",
        94: "an uncorrected memory error that affected only one program",
        121: "a corrected error between GPU and CPU (C2C)",
        160: "a channel of memory was taken out of use",
    },
    XidKind.HARDWARE: {
        48: "an uncorrected memory error (double bit)",
        61: "the GPU's microcontroller stopped at a breakpoint",
        62: "the GPU's microcontroller halted",
        64: "a row or page of bad memory could not be recorded",
        74: _LINK,
        79: "the GPU has fallen off the bus",
        95: "an uncorrected memory error that affected more than one program",
        110: "a security fault",
        119: "the GPU's system processor (GSP) does not answer",
        120: "an error of the GPU's system processor (GSP)",
        122: "the GPU's power unit could not be read",
        123: "the GPU's power unit could not be written",
        136: "a link could not be trained",
        140: "an uncorrected memory error",
        143: "the GPU could not be initialized",
        **dict.fromkeys(range(144, 151), _LINK),
        154: "the GPU driver asks for a recovery",
        155: _LINK,
        156: "a resource was taken out of use",
        157: "a resource could not be taken out of use",
        158: "a fatal timeout of the GPU",
        161: "a channel of memory could not be taken out of use",
    },
}
_OWN_ADVICE = {
    64: "evict the host and replace the GPU: its memory cannot be repaired",
    74: "evict the host; check the links with `nvidia-smi nvlink -e`",
    79: "evict the host and power-cycle it; check seat, power and cooling of the GPU",
    95: "evict the host and reset the GPU at once: its results cannot be trusted",
    154: "evict the host and carry out the GPU's recovery action as `nvidia-smi -q` names it",
}

XIDS: dict[int, Xid] = {
    number: Xid(number, meaning, kind, _OWN_ADVICE.get(number, _ADVICE[kind]))
    for kind, meanings in _KINDS.items()
    for number, meaning in meanings.items()
}


@dataclass(frozen=True, slots=True)
class XidVariant:
    """Messages in which the text changes the meaning of some numbers.

    text: a pattern of the message after the number, in lower case.
    """

    numbers: frozenset[int]
    text: str
    kind: XidKind
    meaning: str

    @property
    def advice(self) -> str:
        return _ADVICE[self.kind]


VARIANTS = (
    XidVariant(
        frozenset(range(144, 151)), r"\bnon-?fatal\b", XidKind.HANDLED, "NVLink: an error that the GPU driver handled"
    ),
    XidVariant(frozenset({154}), r"\bto (?:0x)?0+\b", XidKind.RECOVERED, "a GPU that needs no recovery any more"),
)

CAUSED_BY = r"\bcaused by previous xid (?P<cause>\d+)"
"""Pattern of a message that names another error as its cause. In lower case."""


def xid_of(number: int, text: str = "") -> Xid:
    """Return the meaning of a number with the text of its message, if known. Unlisted numbers are hardware errors."""
    for variant in VARIANTS:
        if number in variant.numbers and re.search(variant.text, text.lower()):
            return Xid(number, variant.meaning, variant.kind, variant.advice)
    return XIDS.get(number) or Xid(number, _UNNAMED, XidKind.HARDWARE, _ADVICE[XidKind.HARDWARE])


def pattern_of(kind: XidKind) -> str:
    """Return a pattern, in lower case, of the number and text of all messages of a kind."""
    changed = [variant for variant in VARIANTS if variant.kind is kind]
    others = "".join(
        rf"(?!{_one_of(variant.numbers)}.*{variant.text})" for variant in VARIANTS if variant.kind is not kind
    )
    if kind is XidKind.HARDWARE:
        numbers = rf"(?!{_one_of(number for other, known in _KINDS.items() if other is not kind for number in known)})"
        found = [rf"{others}{numbers}[1-9]\d{{0,2}}\b"]
    else:
        found = [others + _one_of(_KINDS[kind])] if kind in _KINDS else []
    found += [rf"{_one_of(variant.numbers)}(?=.*{variant.text})" for variant in changed]
    return f"(?:{'|'.join(found)})"


def _one_of(numbers: Iterable[int]) -> str:
    return "(?:" + "|".join(map(str, sorted(numbers))) + r")\b"
