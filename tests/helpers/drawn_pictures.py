"""Pictures drawn by Pillow, and shards of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

ORIENTATION = 0x0112
"""EXIF's tag of a rotation; 6 means that the picture must be turned by 90 degrees clockwise."""


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture of soft colors and edges, another one for each seed."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (-(-height // 16), -(-width // 16), 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """Return the file of a picture."""
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def rotated_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return exif


def unusual_files(width: int = 96, height: int = 64) -> dict[str, bytes]:
    """Return files that are decoded although they are no plain 8-bit RGB, by what is special."""
    plain = drawn(width, height)
    gray16 = Image.fromarray(np.asarray(plain.convert("L")).astype(np.uint16) * 257)
    return {
        "progressive": encoded(plain, quality=90, progressive=True),
        "cmyk": encoded(plain.convert("CMYK"), quality=90),
        "gray": encoded(plain.convert("L"), quality=90),
        "16-bit": encoded(gray16, "PNG"),
        "palette": encoded(plain.convert("P"), "PNG"),
        "transparent": encoded(plain.convert("RGBA"), "PNG"),
        "rotated": encoded(plain, quality=90, exif=rotated_exif()),
        "one-pixel": encoded(drawn(1, 1), "PNG"),
        "webp": encoded(plain, "WEBP", lossless=True),
    }


def shown(content: bytes) -> Image.Image:
    """Return a picture as a viewer shows it: turned by its EXIF data, in RGB, with the upper 8 of 16 bits."""
    with Image.open(io.BytesIO(content)) as file:
        turned = ImageOps.exif_transpose(file)
    if turned.mode.startswith("I"):
        turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
    return turned.convert("RGB")


def resized(content: bytes, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return what Pillow makes of a file. Shape: [size, size, 3]."""
    return np.asarray(shown(content).resize((size, size), Image.Resampling.BILINEAR))


def write_shard(path: Path, members: Mapping[str, bytes], pax: bool = False) -> None:
    """Write a tar file with these members, in this order."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_pictures(directory: Path, num_shards: int, pictures_of_shard: int) -> list[bytes]:
    """Write shards of different pictures with captions; return the files of the pictures by sample number."""
    files: list[bytes] = []
    for shard in range(num_shards):
        members: dict[str, bytes] = {}
        for _ in range(pictures_of_shard):
            number = len(files)
            picture = drawn(40 + number, 60, seed=number)
            is_png = number % 3 == 0
            files.append(encoded(picture, "PNG") if is_png else encoded(picture, quality=90))
            members[f"{number:04}.{'png' if is_png else 'jpg'}"] = files[-1]
            members[f"{number:04}.txt"] = f"picture {number}".encode()
        write_shard(directory / f"shard-{shard}.tar", members)
    return files
