"""The decoder of Pillow in producers: unusual files, and files that are damaged."""

from __future__ import annotations

import numpy as np
from PIL import Image

from megatrain.config.config import all_options
from megatrain.data.pictures.decoders import decoder_identity, make_decoder
from megatrain.data.pictures.picture_format import DECODERS, PILLOW
from tests.helpers.drawn_pictures import drawn, encoded, resized, unusual_files

SIZE = 24


def test_pillow_decodes_as_a_viewer_shows() -> None:
    decoder, files = make_decoder(PILLOW), unusual_files()
    for name, found in zip(files, decoder.decode(list(files.values()), SIZE), strict=True):
        assert isinstance(found, np.ndarray), name
        assert found.dtype == np.uint8, name
        assert np.array_equal(found, resized(files[name], SIZE)), name


def test_damaged_files_cost_only_themselves() -> None:
    good, png = encoded(drawn(50, 40)), encoded(drawn(50, 40), "PNG")
    damaged = {"cut": good[: len(good) // 2], "no picture": b"text", "header only": png[:40], "empty": b""}
    found = make_decoder(PILLOW).decode([good, *damaged.values(), good], SIZE)
    assert [isinstance(one, str) for one in found] == [False, *[True] * len(damaged), False]
    assert all(str(one).startswith("Pillow cannot decode it: ") for one in found[1:-1])


def test_limit_of_pillow_does_not_count_beside_that_of_the_run() -> None:
    make_decoder(PILLOW)
    assert Image.MAX_IMAGE_PIXELS is None


def test_identity_is_that_of_the_decoder() -> None:
    assert decoder_identity(PILLOW) == make_decoder(PILLOW).identity
    assert decoder_identity(PILLOW).startswith("Pillow ")


def test_names_of_decoders_are_those_of_the_configuration() -> None:
    assert all_options()["pictures"]["decoder"].choices == DECODERS
