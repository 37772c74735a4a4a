"""Work for the processes of a worker pool in tests: a separate module, which each process imports without pytest."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from megatrain.contracts.errors import DataError

BAD = 5
"""The number that is refused, or that ends the process."""


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    if number == BAD:
        raise DataError(f"cannot count {number}")
    return number


def end(how: Callable[[], object], number: int) -> int:
    if number == BAD:
        how()
    return os.getpid()


def hang(number: int) -> int:
    while number:
        signal.pause()
    return number


def hold(path: Path, number: int) -> None:
    """Keep a named pipe open for writing until this process dies."""
    with path.open("wb"):
        hang(1)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)
