"""A picture in a file of its own, as input of a trained model."""

from __future__ import annotations

from pathlib import Path

from megatrain.contracts.errors import DataError
from megatrain.data.patches import Patches, patchify
from megatrain.data.pictures.decoder import PictureDecoder
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.data.pictures.picture_header import PictureHeaderError, checked_header, max_encoded_bytes


def patches_of_file(path: Path, decoder: PictureDecoder, picture_format: PictureFormat) -> Patches:
    """Return the patches of a picture, prepared as those of shards are. Shapes: result [P, C].

    Raises: DataError naming the file when it cannot be read or decoded, is too large, or is refused by its header.
    """
    max_bytes = max_encoded_bytes(picture_format.max_pixels)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise DataError(f"{path}: has more than {max_bytes} bytes; use a smaller picture")
        checked_header(content, picture_format.max_pixels)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except PictureHeaderError as error:
        raise DataError(f"{path}: {error}") from None
    (picture,) = decoder.decode([content], picture_format.size)
    if isinstance(picture, str):
        raise DataError(f"{path}: {picture}")
    return patchify(picture, picture_format.patch)
