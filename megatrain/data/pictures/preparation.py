"""Prepares pictures by sample number: reads, decodes, resizes and cuts them into patches. What a producer does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from megatrain.data.patches import patchify
from megatrain.data.pictures.bad_picture import BadPicture, BadPictureError
from megatrain.data.pictures.decoder import BATCH_PICTURES, PictureDecoder
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.data.pictures.shard_reader import EncodedPicture, ShardReader


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """The patches and the caption of a sample, or why it cannot be used. Shapes: patches [patches, patch_values]."""

    number: int
    patches_PV: NDArray[np.uint8] | None
    caption: str = ""
    bad: BadPicture | None = None


def prepared_pictures(
    reader: ShardReader, decoder: PictureDecoder, picture_format: PictureFormat, numbers: Sequence[int]
) -> Iterator[PreparedPicture]:
    """Yield the pictures of these samples, in this order; one that cannot be used does not affect the others.

    To bound memory, pictures are decoded together only if their pixels add up to at most max_pixels.
    Raises: DataError for a number that the index does not have.
    """
    group: list[EncodedPicture | BadPicture] = []
    num_pixels = 0
    for number in numbers:
        read = _read(reader, number, picture_format.max_pixels)
        more = read.header.num_pixels if isinstance(read, EncodedPicture) else 0
        if len(group) == BATCH_PICTURES or num_pixels + more > picture_format.max_pixels:
            yield from _decoded(reader, decoder, picture_format, group)
            group, num_pixels = [], 0
        group.append(read)
        num_pixels += more
    yield from _decoded(reader, decoder, picture_format, group)


def content_digest(data: str, picture_format: PictureFormat, picture: PreparedPicture) -> str:
    """Return the SHA-256 of a prepared picture, with what was asked: data (the digest of the index), format, number."""
    bad = None if picture.bad is None else asdict(picture.bad)
    asked = json.dumps([data, asdict(picture_format), picture.number, picture.caption, bad])
    digest = hashlib.sha256(asked.encode())
    if picture.patches_PV is not None:
        digest.update(np.ascontiguousarray(picture.patches_PV).data)
    return digest.hexdigest()


def _read(reader: ShardReader, number: int, max_pixels: int) -> EncodedPicture | BadPicture:
    try:
        return reader.read(number, max_pixels)
    except BadPictureError as error:
        return error.picture


def _decoded(
    reader: ShardReader,
    decoder: PictureDecoder,
    picture_format: PictureFormat,
    group: Sequence[EncodedPicture | BadPicture],
) -> Iterator[PreparedPicture]:
    encoded = [read for read in group if isinstance(read, EncodedPicture)]
    decoded = iter(decoder.decode([read.content for read in encoded], picture_format.size) if encoded else ())
    for read in group:
        if isinstance(read, BadPicture):
            yield PreparedPicture(read.number, None, bad=read)
            continue
        picture = next(decoded)
        if isinstance(picture, str):
            yield PreparedPicture(read.number, None, bad=reader.bad(read.number, picture))
        else:
            yield PreparedPicture(read.number, patchify(picture, picture_format.patch), read.caption)
