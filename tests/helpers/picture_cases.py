"""Files that a run meets, each a sample of a shard: those that all decoders decode, and those that cost themselves."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatrain.data.pictures.bad_picture import BadPictureError
from megatrain.data.pictures.picture_format import REFUSE, REPLACE, PictureFormat
from megatrain.data.pictures.picture_index import PictureIndex, build_index
from megatrain.data.pictures.picture_source import Pictures
from tests.helpers.drawn_pictures import drawn, encoded, resized, unusual_files, write_shard

FORMAT = PictureFormat(48, 48)
PLAIN = encoded(drawn(90, 70), quality=90)
CANNOT_DECODE = "cannot decode it"
USABLE = {"plain": PLAIN, **unusual_files(), "last": PLAIN}
"""Files that are decoded, by what is special."""


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _huge_png() -> bytes:
    """Return a whole, valid picture of 20,000 x 20,000: 50 MB in one bit a pixel, 1.2 GB in RGB."""
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(20_000 * (1 + 2_500)), 1)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def _animated(kind: str) -> bytes:
    return encoded(drawn(96, 64), kind, save_all=True, append_images=[drawn(96, 64, 1)])


BAD = {
    "cut-jpeg": (PLAIN[:-700], CANNOT_DECODE),
    "cut-png": (encoded(drawn(90, 70), "PNG")[:-700], CANNOT_DECODE),
    "cut-webp": (encoded(drawn(90, 70), "WEBP", lossless=True)[:-700], CANNOT_DECODE),
    "garbage": (PLAIN[:20] + bytes(500), "its JPEG header is damaged at byte 20"),
    "text": (b"hello, this is text", "it is not a JPEG, PNG or WebP picture"),
    "gif": (encoded(drawn(90, 70), "GIF"), "it is not a JPEG, PNG or WebP picture"),
    "animated-png": (_animated("PNG"), "it is an animated PNG; store one frame"),
    "animated-webp": (_animated("WEBP"), "it is an animated WebP; store one frame"),
    "huge": (_huge_png(), "it has 20000 x 20000 pixels, and the limit is 67108864"),
    "no-caption": (PLAIN, "it has no caption"),
    "cut-tar": (PLAIN, "it is cut off: it has"),
}
"""Files that cannot be used, by what is wrong, and the reason that is given."""


def write_cases(directory: Path) -> PictureIndex:
    """Write shards of all files to an empty directory. The last one, of a shard of its own, is cut off in the shard."""
    usable, bad = iter(USABLE.items()), iter(BAD.items())
    members: dict[str, bytes] = {}
    for name, content in [pair for pairs in zip(usable, ((k, v[0]) for k, v in bad), strict=False) for pair in pairs]:
        members[f"{name}.jpg"] = content
        if name != "no-caption":
            members[f"{name}.txt"] = name.encode()
    *_, last = members
    assert last == "cut-tar.txt"
    cut = {name: members.pop(name) for name in ("cut-tar.txt", "cut-tar.jpg")}
    write_shard(directory / "shard-0.tar", members)
    write_shard(directory / "shard-1.tar", cut)
    shard = directory / "shard-1.tar"
    shard.write_bytes(shard.read_bytes()[: 3 * 512 + 200])
    return build_index(directory, allows_cut=True)


def assert_bad_files_cost_themselves(
    index: PictureIndex, ask: Callable[[str], Pictures], tolerance: int, tolerance_of: dict[str, int]
) -> None:
    """Check the pictures of all samples of `write_cases`.

    ask: returns them, by the policy for bad pictures. tolerance: of values from 0 to 255 beside those of Pillow.
    """
    pictures = ask(REPLACE)
    reasons = {Path(bad.member).stem: str(bad) for bad in pictures.bad}
    assert reasons.keys() == BAD.keys()
    for name, (_, reason) in BAD.items():
        shard = index.directory / ("shard-1.tar" if name == "cut-tar" else "shard-0.tar")
        assert reasons[name].startswith(f"{shard}: {name}.jpg (sample ")
        assert reason in reasons[name]
    bad_numbers = {bad.number for bad in pictures.bad}
    names = [name for number, name in enumerate(pictures.captions) if number not in bad_numbers]
    assert sorted(names) == sorted(USABLE)
    for number, name in enumerate(pictures.captions):
        found = pictures.patches_NPV[number].reshape(FORMAT.size, FORMAT.size, 3).astype(int)
        if number in bad_numbers:
            assert name == ""
            assert not found.any()
        else:
            difference = np.abs(found - resized(USABLE[name], FORMAT.size)).max()
            assert difference <= tolerance_of.get(name, tolerance), name
    with pytest.raises(BadPictureError) as raised:
        ask(REFUSE)
    first = min(pictures.bad, key=lambda bad: bad.number)
    assert raised.value.picture == first
