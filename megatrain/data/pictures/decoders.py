"""The decoders that a producer can have, by name. Loads neither DALI nor Pillow."""

from __future__ import annotations

from megatrain.contracts.errors import DataError
from megatrain.data.pictures.dali_package import find_dali
from megatrain.data.pictures.decoder import DaliDecoder, PictureDecoder, dali_identity
from megatrain.data.pictures.picture_format import CPU, DALI, MIXED, PILLOW
from megatrain.data.pictures.pillow_decoder import PillowDecoder, pillow_identity


def make_decoder(name: str, num_threads: int = 1) -> PictureDecoder:
    """Return a decoder. name: one of DECODERS. num_threads: the threads of DALI; Pillow decodes in one thread.

    Raises: DataError when it is not installed or cannot be used here.
    """
    return PillowDecoder() if name == PILLOW else DaliDecoder(_device(name), num_threads)


def decoder_identity(name: str) -> str:
    """Return the identity of a decoder, without loading it. Raises: DataError when it is not installed."""
    if name == PILLOW:
        return pillow_identity()
    found = find_dali()
    if found.problem:
        raise DataError(f"{found.problem}; {found.hint}")
    return dali_identity(found, _device(name))


def _device(name: str) -> str:
    return CPU if name == DALI else MIXED
