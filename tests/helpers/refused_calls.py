"""A kernel without a system call, as older kernels and sandboxes: a filter of this process (seccomp)."""

from __future__ import annotations

import ctypes
import errno
import os

from tests.helpers.require import require

_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}
"""By machine."""
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8), ("if_false", ctypes.c_uint8),
                ("operand", ctypes.c_uint32)]  # fmt: skip


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def renameat2_number() -> int:
    """Return the number of the call that can exchange two directories. Skips the test where the number is unknown."""
    machine = os.uname().machine
    require("renameat2", found=machine in _RENAMEAT2, reason=f"its number on {machine} is not known")
    return _RENAMEAT2[machine]


def refuse_call(number: int) -> None:
    """Let a system call fail with ENOSYS in this process from now on."""
    instructions = (_Instruction * 4)(
        (_LOAD_WORD, 0, 0, 0),  # the number of the call
        (_JUMP_IF_EQUAL, 0, 1, number),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_RETURN, 0, 0, _ALLOW),
    )
    library = ctypes.CDLL(None, use_errno=True)
    program = _Filter(len(instructions), instructions)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)),
    ):
        if library.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
