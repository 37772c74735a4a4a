"""A producer whose decoder crashes at marked pictures, as a program of its own.

    python -m tests.helpers.crashing_producer LISTENER SECRET NOTE ENDS SIGNAL LEFT DIRECTORY...

LEFT: a file with the number of crashes that are left.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatrain.data.pictures.producer import serve_pictures
from megatrain.data.pictures.producers import MakeCommand
from tests.helpers.pillow_producer import PillowDecoder

MARK = b"the decoder crashes here"
"""The end of the file of a picture at which the decoder crashes."""


class CrashingDecoder(PillowDecoder):
    def __init__(self, signal: int, left: Path) -> None:
        super().__init__()
        self._signal = signal
        self._left = left

    def decode(self, contents: Sequence[bytes], size: int) -> list[np.ndarray | str]:
        if any(content.endswith(MARK) for content in contents):
            left = int(self._left.read_text())
            if left:
                self._left.write_text(str(left - 1))
                os.kill(os.getpid(), self._signal)
        return super().decode(contents, size)


def crashing_command(directories: Sequence[Path], signal: int, left: Path) -> MakeCommand:
    """Return the command of such a producer of the pictures in some directories."""

    def command(inherited: Sequence[int]) -> Sequence[str]:
        arguments = (*map(str, inherited), str(int(signal)), str(left), *map(str, directories))
        return (sys.executable, "-m", "tests.helpers.crashing_producer", *arguments)

    return command


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    *numbers, left = sys.argv[1:7]
    *descriptors, signal = map(int, numbers)
    directories = [Path(one) for one in sys.argv[7:]]
    sys.exit(serve_pictures(directories, descriptors, lambda: CrashingDecoder(signal, Path(left))))
