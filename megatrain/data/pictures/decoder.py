"""Decodes and resizes pictures with NVIDIA DALI. DALI is loaded when a decoder is made.

A pipeline is fast, but one picture that cannot be decoded fails the whole batch, and the pipeline is not valid
afterwards. So the pictures of a failed batch are decoded once more, one by one, and each failure costs a new pipeline
(8 ms, measured on one core). DALI applies the rotation of EXIF data, converts CMYK and gray to RGB, drops transparency,
and keeps the upper 8 of 16 bits.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatrain.contracts.errors import DataError
from megatrain.data.pictures.dali_package import DALI_INSTALL, FoundDali, find_dali
from megatrain.data.pictures.picture_format import MIXED

BATCH_PICTURES = 16
_MAX_REASON = 200


class PictureDecoder(Protocol):
    """What a producer decodes with."""

    @property
    def identity(self) -> str:
        """The name and version of the program that decodes. Decoders with the same identity make the same pixels."""

    def decode(self, contents: Sequence[bytes], size: int) -> list[NDArray[np.uint8] | str]:
        """Return each picture as RGB, resized as a whole, or why it cannot be decoded.

        contents: the files of at most BATCH_PICTURES pictures. Shapes: each result [size, size, 3].
        """


class DaliDecoder:
    """Decodes with DALI. For use by one thread. The decoder keeps the pipeline of the last size.

    device: one of DEVICES. num_threads: how many threads of DALI decode the pictures of a batch.
    Raises: DataError when DALI is not installed, cannot be loaded, or cannot use the device.
    """

    def __init__(self, device: str, num_threads: int = 1) -> None:
        found = find_dali()
        if found.problem:
            raise DataError(f"{found.problem}; {found.hint}")
        try:
            import nvidia.dali  # the functions of a pipeline are looked up in it
        except Exception as error:
            raise DataError(f"NVIDIA DALI {found.version} cannot be loaded: {error}; {DALI_INSTALL}") from error
        self._dali: Any = nvidia.dali
        self._device = device
        self._num_threads = num_threads
        self._pipeline: Any = None
        self._size = 0
        self._identity = dali_identity(found, device)
        (probe,) = self.decode([_one_pixel()], 1)
        if isinstance(probe, str):
            raise DataError(f'NVIDIA DALI {found.version} cannot decode with device="{device}" here: {probe}')

    @property
    def identity(self) -> str:
        return self._identity

    def decode(self, contents: Sequence[bytes], size: int) -> list[NDArray[np.uint8] | str]:
        """See PictureDecoder."""
        try:
            return list(self._run(contents, size))
        except RuntimeError as error:
            self._pipeline = None
            if len(contents) == 1:
                return [_reason(error)]
        return [self.decode([content], size)[0] for content in contents]

    def _run(self, contents: Sequence[bytes], size: int) -> list[NDArray[np.uint8]]:
        if self._pipeline is None or self._size != size:
            self._pipeline, self._size = self._build(size), size
        self._pipeline.feed_input("encoded", [np.frombuffer(content, np.uint8) for content in contents])
        (pictures,) = self._pipeline.run()
        if self._device == MIXED:
            pictures = pictures.as_cpu()
        # copies: the pipeline uses the memory again
        return [np.array(pictures.at(number)) for number in range(len(contents))]

    def _build(self, size: int) -> Any:
        fn, types = self._dali.fn, self._dali.types
        pipeline = self._dali.Pipeline(
            batch_size=BATCH_PICTURES, num_threads=self._num_threads, prefetch_queue_depth=1, exec_pipelined=False,
            exec_async=False, device_id=0 if self._device == MIXED else None,
        )  # fmt: skip
        # With a decoder in hardware, DALI divides a batch between two decoders, whose pixels differ: the pixels of a
        # picture must not depend on its neighbors.
        options = {"hw_decoder_load": 0.0} if self._device == MIXED else {}
        with pipeline:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
            pictures = fn.decoders.image(encoded, device=self._device, output_type=types.RGB, **options)
            pipeline.set_outputs(
                fn.resize(pictures, size=[size, size], interp_type=types.INTERP_LINEAR, antialias=True)
            )
        pipeline.build()
        return pipeline


def dali_identity(found: FoundDali, device: str) -> str:
    """Return the identity of the decoder of an installed build."""
    return f"DALI {found.version} {device}"


def _reason(error: RuntimeError) -> str:
    """Return what DALI says about a picture, without the traceback of the pipeline's definition."""
    text = str(error).rpartition("encountered:")[2].replace("Current pipeline object is no longer valid.", "")
    return f"DALI cannot decode it: {' '.join(text.split())[:_MAX_REASON] or 'no reason given'}"


def _one_pixel() -> bytes:
    """Return a PNG file of one gray pixel."""
    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0\x80")), (b"IEND", b""))
    parts = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
             for kind, data in chunks]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
