"""Decoding with NVIDIA DALI, where it is installed (`make test-dali`): the pixels are those of Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.pictures.dali_package import find_dali
from megatrain.data.pictures.decoder import DaliDecoder
from megatrain.data.pictures.picture_format import CPU, DALI, MIXED, REPLACE, PictureFormat
from megatrain.data.pictures.picture_index import build_index
from megatrain.data.pictures.picture_source import PictureSource, Producers
from megatrain.data.pictures.producers import local_producers, producer_command
from tests.helpers.drawn_pictures import (
    drawn,
    encoded,
    resized,
    rotated_exif,
    unusual_files,
    write_pictures,
    write_shard,
)
from tests.helpers.require import require

PROBLEM = find_dali().problem
require("dali", not PROBLEM, PROBLEM)

SIZE = 48
MAX_DIFFERENCE = 1
"""Tolerance of values from 0 to 255 after resizing: the filters round differently."""
MAX_DIFFERENCE_OF = {"palette": 4}
"""Tolerance of dithered pictures, whose neighbouring pixels differ strongly."""
PLAIN = encoded(drawn(90, 70), quality=90)
BROKEN = {
    "cut-jpeg": PLAIN[:-700],
    "cut-png": encoded(drawn(90, 70), "PNG")[:-700],
    "cut-webp": encoded(drawn(90, 70), "WEBP", lossless=True)[:-700],
    "garbage": PLAIN[:20] + bytes(500),
}


@pytest.fixture(scope="module")
def decoder() -> DaliDecoder:
    return DaliDecoder(CPU)


@pytest.mark.parametrize("name", ["plain", *unusual_files()])
def test_dali_makes_the_pixels_of_pillow(name: str, decoder: DaliDecoder) -> None:
    content = {"plain": PLAIN, **unusual_files()}[name]
    (found,) = decoder.decode([content], SIZE)
    assert isinstance(found, np.ndarray), found
    assert found.shape == (SIZE, SIZE, 3)
    assert found.dtype == np.uint8
    difference = np.abs(found.astype(int) - resized(content, SIZE)).max()
    assert difference <= MAX_DIFFERENCE_OF.get(name, MAX_DIFFERENCE)


def test_dali_decodes_as_pillow_without_resizing(decoder: DaliDecoder) -> None:
    for name, content in unusual_files(SIZE, SIZE).items():
        if name != "one-pixel":
            assert np.array_equal(decoder.decode([content], SIZE)[0], resized(content, SIZE)), name


@pytest.mark.parametrize("name", BROKEN)
def test_dali_fails_for_the_broken_picture_alone(name: str, decoder: DaliDecoder) -> None:
    expected = decoder.decode([PLAIN], SIZE)[0]
    found = decoder.decode([PLAIN, BROKEN[name], PLAIN, BROKEN[name]], SIZE)
    assert [isinstance(one, str) and "DALI cannot decode it" in one for one in found] == [False, True, False, True]
    assert np.array_equal(found[0], expected)
    assert np.array_equal(found[2], expected)


def test_dali_pixels_do_not_depend_on_the_batch(decoder: DaliDecoder) -> None:
    contents = [PLAIN, *unusual_files().values()]
    together = decoder.decode(contents, SIZE)
    for content, found in zip(reversed(contents), reversed(together), strict=True):
        assert np.array_equal(decoder.decode([content], SIZE)[0], found)


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has a GPU")
def test_dali_without_a_gpu_names_the_device() -> None:
    with pytest.raises(DataError, match='cannot decode with device="mixed" here'):
        DaliDecoder(MIXED)


@pytest.mark.slow
def test_dali_producers_cost_only_the_broken_picture(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    files = write_pictures(tmp_path / "shards", 2, 9)
    exif = encoded(drawn(90, 70), "WEBP", exif=rotated_exif())
    write_shard(
        tmp_path / "shards" / "t.tar",
        {f"{name}.jpg": content for name, content in BROKEN.items()}
        | {"exif.webp": exif} | {f"{name}.txt": b"" for name in [*BROKEN, "exif"]},
    )  # fmt: skip
    index = build_index(tmp_path / "shards")
    picture_format = PictureFormat(SIZE, SIZE)
    with local_producers(producer_command([index.directory], DALI), 2, tmp_path / "logs", lambda _text: None) as local:
        producers = Producers(local.addresses, local.secret, local.problem)
        with PictureSource(index.digest, picture_format, producers, REPLACE) as source:
            pictures = source.patches(range(index.num_samples))
    bad = {one.number: one for one in pictures.bad}
    assert set(range(len(files), len(files) + len(BROKEN))) <= set(bad) <= set(range(len(files), index.num_samples))
    assert [bad[len(files) + place].member for place in range(len(BROKEN))] == [f"{name}.jpg" for name in BROKEN]
    for number, content in enumerate(files):
        found = pictures.patches_NPV[number].reshape(SIZE, SIZE, 3).astype(int)
        assert np.abs(found - resized(content, SIZE)).max() <= MAX_DIFFERENCE, number
