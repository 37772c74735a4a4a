"""Decodes and resizes pictures with Pillow. Pillow is loaded when a decoder is made.

The decoder rotates, converts and reduces to 8 bits as DALI does; the pixels still differ, because the filters differ.
"""

from __future__ import annotations

import importlib.metadata
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError

PILLOW_INSTALL = "pip install 'megatrain[pillow]'"
_PACKAGE = "pillow"


def pillow_identity() -> str:
    """Return the identity of the decoder, without loading it. Raises: DataError when Pillow is not installed."""
    try:
        return f"Pillow {importlib.metadata.version(_PACKAGE)}"
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(f"Pillow is not installed; {PILLOW_INSTALL}") from error


class PillowDecoder:
    """Decodes with Pillow, in one thread: PictureDecoder. Raises: DataError when Pillow cannot be loaded."""

    def __init__(self) -> None:
        self._identity = pillow_identity()
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise DataError(f"{self._identity} cannot be loaded: {error}; {PILLOW_INSTALL}") from error
        self._image, self._operations = Image, ImageOps
        # megatrain has checked its own limit with the header
        Image.MAX_IMAGE_PIXELS = None

    @property
    def identity(self) -> str:
        return self._identity

    def decode(self, contents: Sequence[bytes], size: int) -> list[NDArray[np.uint8] | str]:
        """See PictureDecoder."""
        return [self._decoded(content, size) for content in contents]

    def _decoded(self, content: bytes, size: int) -> NDArray[np.uint8] | str:
        try:
            with self._image.open(io.BytesIO(content)) as file:
                picture = self._operations.exif_transpose(file)
            if picture.mode.startswith("I"):
                # convert() would clip values of 16 bits and not shift them
                picture = self._image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            resized = picture.convert("RGB").resize((size, size), self._image.Resampling.BILINEAR)
            return np.asarray(resized)
        except Exception as error:  # noqa: BLE001 -- for damaged files, Pillow raises many kinds of errors
            return f"Pillow cannot decode it: {error}"
