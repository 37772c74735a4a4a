"""NVIDIA's Xid numbers: what each means for the host, and what to do. The one table of them (NVIDIA's Xid catalogue).

Classification of logs, the check of the kernel's log, the health of a job, the page and docs/runbooks/gpu-errors.md
go by it. A number that is not listed counts as the GPU's, its links' or its firmware's: to keep such a host in a job
costs more than to look at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class XidKind(StrEnum):
    """Whose error it is."""

    PROGRAM = "program"
    """A program alone can cause it."""
    CLEAN_UP = "clean-up"
    """The driver ends a program's channels after something else."""
    MENDED = "mended"
    """Hardware, and the driver has dealt with it: a row was remapped, an error corrected or kept to one program."""
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True)
class Xid:
    """A number and what is known of it."""

    number: int
    meaning: str
    kind: XidKind
    advice: str


_ADVICE = {
    XidKind.PROGRAM: "look at the program; evict the host when it comes again there",
    XidKind.CLEAN_UP: "look at what came before it",
    XidKind.MENDED: "reset the GPU when the host is free; evict the host when it comes often",
    XidKind.HARDWARE: "evict the host, reset the GPU; replace it when it comes again",
}
_ENGINE = "an engine of the GPU raised an exception"
_LINK = "NVLink: an error of the link"
_UNNAMED = "not in the catalogue of this version"
_KINDS: dict[XidKind, dict[int, str]] = {
    XidKind.PROGRAM: {
        6: "invalid push buffer",
        7: "invalid address in a push buffer",
        8: "the GPU stopped processing",
        11: "invalid or corrupted push buffer",
        12: "the driver handled an exception of the graphics engine",
        13: "exception of the graphics engine: an access that is not allowed, for instance",
        **dict.fromkeys((24, 25, 26, 27, 28, 29, 30), "the driver was given something invalid"),
        31: "memory page fault: an address that is not mapped",
        32: "invalid or corrupted push buffer",
        **dict.fromkeys((33, 34, 35, 36, 37, 38, 39, 40, 41, 42), _ENGINE),
        43: "the GPU stopped processing the program's work",
        44: "fault of the graphics engine",
        **dict.fromkeys((46, 47, 59), "the GPU stopped processing"),
        **dict.fromkeys((67, 68, 69, 70, 75, 76, 86), _ENGINE),
        109: "a context switch took too long",
    },
    XidKind.CLEAN_UP: {45: "the driver ends a program's channels"},
    XidKind.MENDED: {
        63: "a row of memory was marked for remapping, or a page retired",
        92: "many corrected errors of memory",
        94: "an uncorrected error of memory that was kept to one program",
        121: "a corrected error between GPU and CPU (C2C)",
        160: "a channel of memory was taken out of use",
    },
    XidKind.HARDWARE: {
        48: "an uncorrected error of memory (double bit)",
        61: "the GPU's microcontroller stopped at a breakpoint",
        62: "the GPU's microcontroller halted",
        64: "a row or page of bad memory could not be recorded",
        74: _LINK,
        79: "the GPU has fallen off the bus",
        95: "an uncorrected error of memory that harmed more than one program",
        110: "a security fault",
        119: "the GPU's system processor (GSP) does not answer",
        120: "an error of the GPU's system processor (GSP)",
        122: "the GPU's power unit could not be read",
        123: "the GPU's power unit could not be written",
        136: "a link could not be trained",
        140: "an uncorrected error of memory",
        143: "the GPU could not be initialized",
        **dict.fromkeys(range(144, 151), _LINK),
        154: "the driver asks for a recovery",
        155: _LINK,
        156: "a resource was taken out of use",
        157: "a resource could not be taken out of use",
        158: "a fatal timeout of the GPU",
        161: "a channel of memory could not be taken out of use",
    },
}
_OWN_ADVICE = {
    64: "evict the host and replace the GPU: its memory cannot be mended",
    74: "evict the host; look at the links with `nvidia-smi nvlink -e`",
    79: "evict the host and power-cycle it; look at seat, power and cooling of the GPU",
    95: "evict the host and reset the GPU at once: what it computes is not to be trusted",
    154: "evict the host and do what `nvidia-smi -q` names as the GPU's recovery action",
}

XIDS: dict[int, Xid] = {
    number: Xid(number, meaning, kind, _OWN_ADVICE.get(number, _ADVICE[kind]))
    for kind, meanings in _KINDS.items()
    for number, meaning in meanings.items()
}
PROGRAM_FAULT, CLEAN_UP, MENDED = (
    frozenset(_KINDS[kind]) for kind in (XidKind.PROGRAM, XidKind.CLEAN_UP, XidKind.MENDED)
)


def xid_of(number: int) -> Xid:
    """Return what is known of a number; one that is not listed is of the hardware."""
    return XIDS.get(number) or Xid(number, _UNNAMED, XidKind.HARDWARE, _ADVICE[XidKind.HARDWARE])


def one_of(numbers: frozenset[int]) -> str:
    """Return a pattern of one of the numbers."""
    return "(?:" + "|".join(map(str, sorted(numbers))) + r")\b"


def none_of(numbers: frozenset[int]) -> str:
    """Return a pattern of any other positive number."""
    return f"(?!{one_of(numbers)})" + r"[1-9]\d{0,2}\b"
