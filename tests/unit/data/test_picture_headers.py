"""Headers of pictures, as Pillow writes them: format, size, animation, and what is refused before it is decoded."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from megatrain.data.pictures.picture_header import PictureHeader, PictureHeaderError, header_problem, read_header
from tests.helpers.drawn_pictures import drawn, encoded, rotated_exif, unusual_files

PLAIN = drawn(96, 64)
ANIMATED = {
    "PNG": encoded(PLAIN, "PNG", save_all=True, append_images=[drawn(96, 64, 1)]),
    "WebP": encoded(PLAIN, "WEBP", save_all=True, append_images=[drawn(96, 64, 1)]),
}
MORE = {
    "lossy webp": encoded(PLAIN, "WEBP", quality=80),
    "webp with exif": encoded(PLAIN, "WEBP", exif=rotated_exif()),
    "jpeg with thumbnail of another size": encoded(PLAIN, comment=encoded(drawn(8, 8))),
}


@pytest.mark.parametrize("name", [*unusual_files(), *MORE])
def test_header_of_a_picture_is_what_pillow_reads(name: str) -> None:
    content = {**unusual_files(), **MORE}[name]
    with Image.open(io.BytesIO(content)) as file:
        expected = PictureHeader({"WEBP": "WebP"}.get(str(file.format), str(file.format)), *file.size)
    assert read_header(content) == expected
    assert header_problem(expected, 96 * 64) == ""


@pytest.mark.parametrize("name", ANIMATED)
def test_header_of_an_animation_is_refused_by_name(name: str) -> None:
    header = read_header(ANIMATED[name])
    assert header == PictureHeader(name, 96, 64, is_animated=True)
    assert header_problem(header, 1 << 26) == f"it is an animated {name}; store one frame"


def test_header_of_huge_picture_is_refused_undecoded() -> None:
    """A file of a few bytes that says 20,000 x 20,000: decoding it would take 1.2 GB."""
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + ihdr + struct.pack(">I", zlib.crc32(ihdr))
    header = read_header(b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT")
    assert header == PictureHeader("PNG", 20_000, 20_000)
    assert "it has 20000 x 20000 pixels, and the limit is 67108864" in header_problem(header, 1 << 26)
    assert header_problem(header, 400_000_000) == ""
    assert "0 x 5 pixels" in header_problem(PictureHeader("PNG", 0, 5), 1)


@pytest.mark.parametrize(
    "content", [encoded(PLAIN), encoded(PLAIN, "PNG"), *(MORE[name] for name in list(MORE)[:2]), *ANIMATED.values()]
)
def test_header_that_is_cut_off_is_refused_by_name(content: bytes) -> None:
    for length in range(12, 30):
        with pytest.raises(PictureHeaderError, match="cut off in its header"):
            read_header(content[:length])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not a JPEG, PNG or WebP picture"),
        (b"hello, this is text", "it starts with b'hello, t'"),
        (encoded(PLAIN, "GIF"), "it starts with b'GIF8"),
        (encoded(PLAIN, "BMP"), "it is not a JPEG, PNG or WebP picture"),
        (b"\xff\xd8\xff\xd9", "its JPEG header has no frame"),
        (b"\xff\xd8\xff\xe0\x00\x02hello", "its JPEG header is damaged at byte 6"),
        (b"RIFF\0\0\0\0WEBPABCD" + bytes(20), "an unknown chunk b'ABCD'"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\0IEND" + bytes(9), "does not begin with IHDR"),
    ],
)
def test_header_of_another_file_is_refused_by_name(content: bytes, reason: str) -> None:
    with pytest.raises(PictureHeaderError) as raised:
        read_header(content)
    assert reason in str(raised.value)
