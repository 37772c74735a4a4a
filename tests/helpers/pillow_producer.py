"""A producer of pictures that decodes with Pillow: the same program as with DALI, on machines without it.

python -m tests.helpers.pillow_producer DIRECTORY LISTENER SECRET [NAME]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatrain.data.pictures.producer import serve_pictures
from megatrain.data.pictures.producers import MakeCommand
from tests.helpers.drawn_pictures import resized


class PillowDecoder:
    """See PictureDecoder."""

    def __init__(self, identity: str = "Pillow") -> None:
        self.identity = identity

    def decode(self, contents: Sequence[bytes], size: int) -> list[NDArray[np.uint8] | str]:
        return [self._decoded(content, size) for content in contents]

    def _decoded(self, content: bytes, size: int) -> NDArray[np.uint8] | str:
        try:
            return resized(content, size)
        except (OSError, SyntaxError) as error:  # Pillow raises the second for a damaged PNG file
            return f"Pillow cannot decode it: {error}"


def pillow_command(directory: Path, name: str = "Pillow") -> MakeCommand:
    def command(listener: int, secret: int) -> Sequence[str]:
        return (sys.executable, "-m", "tests.helpers.pillow_producer", str(directory), str(listener), str(secret), name)

    return command


if __name__ == "__main__":
    sys.exit(serve_pictures(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), lambda: PillowDecoder(sys.argv[4])))
