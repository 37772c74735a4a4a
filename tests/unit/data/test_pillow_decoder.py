"""The decoder of Pillow in producers: unusual files, and files that are damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from megatrain.config.sections import all_options
from megatrain.data.pictures.decoders import decoder_identity, make_decoder
from megatrain.data.pictures.picture_format import DECODERS, PILLOW
from megatrain.data.pictures.picture_source import Pictures, PictureSource
from tests.helpers.drawn_pictures import resized, unusual_files
from tests.helpers.picture_cases import FORMAT, assert_bad_files_cost_themselves, write_cases
from tests.helpers.pillow_producer import producers_in_threads

SIZE = 24


def test_pillow_decodes_as_a_viewer_shows() -> None:
    decoder, files = make_decoder(PILLOW), unusual_files()
    for name, found in zip(files, decoder.decode(list(files.values()), SIZE), strict=True):
        assert isinstance(found, np.ndarray), name
        assert found.dtype == np.uint8, name
        assert np.array_equal(found, resized(files[name], SIZE)), name


def test_bad_files_cost_only_themselves_with_pillow(tmp_path: Path) -> None:
    index = write_cases(tmp_path)
    with producers_in_threads([index], make_decoder(PILLOW)) as producers:

        def ask(bad_pictures: str) -> Pictures:
            with PictureSource(index.digest, FORMAT, producers, bad_pictures) as source:
                return source.patches(range(index.num_samples))

        assert_bad_files_cost_themselves(index, ask, 0, {})


def test_limit_of_pillow_does_not_count_beside_that_of_the_run() -> None:
    make_decoder(PILLOW)
    assert Image.MAX_IMAGE_PIXELS is None


def test_identity_is_that_of_the_decoder() -> None:
    assert decoder_identity(PILLOW) == make_decoder(PILLOW).identity
    assert decoder_identity(PILLOW).startswith("Pillow ")


def test_names_of_decoders_are_those_of_the_configuration() -> None:
    assert all_options()["pictures"]["decoder"].choices == DECODERS
