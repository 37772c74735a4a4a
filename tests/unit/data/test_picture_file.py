"""A picture in a file of its own is prepared as one of a shard, or refused with the name of the file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.patches import patchify
from megatrain.data.pictures.picture_file import patches_of_file
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.data.pictures.pillow_decoder import PillowDecoder
from tests.helpers.drawn_pictures import drawn, encoded, resized, rotated_exif

FORMAT = PictureFormat(24, 8, max_pixels=4096)


def test_picture_becomes_patches(tmp_path: Path) -> None:
    for kind, options in (("JPEG", {"exif": rotated_exif()}), ("PNG", {})):
        content = encoded(drawn(40, 30), kind, **options)
        path = tmp_path / "any-name"
        path.write_bytes(content)

        found = patches_of_file(path, PillowDecoder(), FORMAT)
        assert np.array_equal(found, patchify(resized(content, 24), 8)), kind


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"text", "it is not a JPEG, PNG or WebP picture"),
        (encoded(drawn(65, 64), "PNG"), "it has 65 x 64 pixels, and the limit is 4096"),
        (encoded(drawn(40, 30), "PNG")[:60], "Pillow cannot decode it"),
        (bytes(1 << 25), "has more than"),
    ],
    ids=["missing", "text", "large", "cut off", "long"],
)
def test_file_that_cannot_be_used_is_named(content: bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: {reason}"):
        patches_of_file(path, PillowDecoder(), FORMAT)
