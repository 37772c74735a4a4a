"""The header of a picture: what is in the file, without decoding it. The size is checked before memory is allocated.

Formats: JPEG (ITU-T T.81, annex B), PNG (W3C PNG, third edition), WebP (RFC 9649).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_START = b"\xff\xd8\xff"
_SOF_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of a frame header. The three others in this range stand for tables, or are reserved."""
_MARKERS_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WEBP_HAS_ANIMATION = 0x02
_VP8_START_CODE = b"\x9d\x01\x2a"
_VP8L_SIGNATURE = 0x2F
_ENCODED_BYTES_OF_PIXEL = 8
"""The most that any format needs without compression: 16 bits of each of four channels."""
_SPARE_BYTES = 16 << 20
"""For metadata in the file of a small picture."""


class PictureHeaderError(Exception):
    """The header of a picture is the reason to refuse it: the format is not supported, the header is cut off or
    damaged, or the picture is animated, empty or too large. The text is the reason."""


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """Format and size of a picture, before a rotation that its EXIF data asks for."""

    format: str
    width: int
    height: int
    is_animated: bool = False

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


def read_header(content: bytes) -> PictureHeader:
    """Return the header of a JPEG, PNG or WebP file. The content decides, not the name of the file.

    Raises: PictureHeaderError.
    """
    try:
        if content.startswith(_JPEG_START):
            return _jpeg_header(content)
        if content.startswith(_PNG_SIGNATURE):
            return _png_header(content)
        if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
            return _webp_header(content)
    except (struct.error, IndexError):
        raise PictureHeaderError("it is cut off in its header") from None
    raise PictureHeaderError(f"it is not a JPEG, PNG or WebP picture: it starts with {content[:8]!r}")


def checked_header(content: bytes, max_pixels: int) -> PictureHeader:
    """Return the header of a picture that may be decoded. Raises: PictureHeaderError."""
    header = read_header(content)
    problem = header_problem(header, max_pixels)
    if problem:
        raise PictureHeaderError(problem)
    return header


def header_problem(header: PictureHeader, max_pixels: int) -> str:
    """Return why a picture with this header is refused before it is decoded; empty if it is not."""
    if header.is_animated:
        return f"it is an animated {header.format}; store one frame"
    if not header.num_pixels:
        return f"its header has {header.width} x {header.height} pixels"
    if header.num_pixels > max_pixels:
        return (
            f"it has {header.width} x {header.height} pixels, and the limit is {max_pixels}; store a smaller picture, "
            "or raise the limit (max_pixels)"
        )
    return ""


def max_encoded_bytes(max_pixels: int) -> int:
    """Return the size limit of a picture's file, which is read as a whole before its header is known."""
    return _ENCODED_BYTES_OF_PIXEL * max_pixels + _SPARE_BYTES


def _jpeg_header(content: bytes) -> PictureHeader:
    place = 2
    while True:
        if content[place] != 0xFF:
            raise PictureHeaderError(f"its JPEG header is damaged at byte {place}")
        marker = content[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
        elif marker in _MARKERS_WITHOUT_LENGTH:
            place += 2
        elif marker in _SOF_MARKERS:
            height, width = struct.unpack_from(">HH", content, place + 5)
            return PictureHeader("JPEG", width, height)
        elif marker in (_START_OF_SCAN, _END_OF_IMAGE):
            raise PictureHeaderError("its JPEG header has no frame")
        else:
            (length,) = struct.unpack_from(">H", content, place + 2)
            place += 2 + max(length, 2)


def _png_header(content: bytes) -> PictureHeader:
    kind, width, height = struct.unpack_from(">4sII", content, 12)
    if kind != b"IHDR":
        raise PictureHeaderError("its PNG header does not begin with IHDR")
    place = len(_PNG_SIGNATURE)
    while True:
        length, kind = struct.unpack_from(">I4s", content, place)
        if kind in (b"acTL", b"IDAT"):
            return PictureHeader("PNG", width, height, is_animated=kind == b"acTL")
        place += 12 + length


def _webp_header(content: bytes) -> PictureHeader:
    (kind,) = struct.unpack_from("4s", content, 12)
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(content[place : place + 3], "little") for place in (24, 27))
        if len(content) < 30:
            raise IndexError
        return PictureHeader("WebP", width, height, is_animated=bool(content[20] & _WEBP_HAS_ANIMATION))
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", content, 20)
        if signature == _VP8L_SIGNATURE:
            return PictureHeader("WebP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        start_code, width, height = struct.unpack_from("<3sHH", content, 23)
        if start_code == _VP8_START_CODE:
            return PictureHeader("WebP", width & 0x3FFF, height & 0x3FFF)
    raise PictureHeaderError(f"its WebP header begins with an unknown chunk {kind!r}")
