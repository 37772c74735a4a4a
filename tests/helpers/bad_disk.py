"""A disk that cannot read some bytes of every file: pread of such bytes fails with EIO."""

from __future__ import annotations

import errno
import os

import pytest


def break_disk(patch: pytest.MonkeyPatch, first: int, end: int, longest: int = 1 << 40) -> None:
    """Make bytes `first` to `end` - 1 unreadable. Reads of more than `longest` bytes do not fail."""
    pread = os.pread

    def read(descriptor: int, num_bytes: int, offset: int) -> bytes:
        if num_bytes > longest or offset >= end or offset + num_bytes <= first:
            return pread(descriptor, num_bytes, offset)
        if offset < first:
            return pread(descriptor, first - offset, offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(os, "pread", read)
