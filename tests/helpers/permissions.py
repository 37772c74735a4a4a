"""File permissions that apply to root too: an access that the mode of a file forbids is refused to every process."""

from __future__ import annotations

import ctypes
import os

_CAPABILITIES = (1, 2)
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH"""
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def heed_permissions() -> None:
    """Apply them to this process and to all of its children. They always apply to users other than root."""
    if os.geteuid() != 0:
        return
    library = ctypes.CDLL(None, use_errno=True)
    # A program that root starts would regain the rights.
    for capability in _CAPABILITIES:
        library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, sets = _Header(_CAPABILITY_VERSION_3, 0), (_Sets * 2)()
    _check(library.capget(ctypes.byref(header), sets))
    kept = ~sum(1 << capability for capability in _CAPABILITIES) & 0xFFFFFFFF
    for name, _ in _Sets._fields_:
        setattr(sets[0], name, getattr(sets[0], name) & kept)
    _check(library.capset(ctypes.byref(header), sets))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
