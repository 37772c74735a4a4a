"""Decoding with NVIDIA DALI, where it is installed (`make test-dali`): the pixels are those of Pillow."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.pictures.dali_package import find_dali
from megatrain.data.pictures.decoder import DaliDecoder
from megatrain.data.pictures.picture_format import CPU, DALI, MIXED
from megatrain.data.pictures.picture_index import PictureIndex
from megatrain.data.pictures.picture_source import Pictures, PictureSource, Producers
from megatrain.data.pictures.producers import PictureProducers, local_producers, producer_command
from megatrain.data.reader import BatchReader
from megatrain.training.picture_data import find_decoder
from megatrain.training.training_data import all_shards, open_reader
from tests.helpers.drawn_pictures import resized, unusual_files
from tests.helpers.picture_cases import BAD, FORMAT, PLAIN, assert_bad_files_cost_themselves, write_cases
from tests.helpers.picture_shards import shard_tables, write_shards
from tests.helpers.processes import descendants
from tests.helpers.read_samples import by_sample, read
from tests.helpers.require import require
from tests.helpers.training_case import make_config

PROBLEM = find_dali().problem
require("dali", not PROBLEM, PROBLEM)

SIZE = 48
MAX_DIFFERENCE = 1
"""Tolerance of values from 0 to 255 after resizing: the filters round differently."""
MAX_DIFFERENCE_OF = {"palette": 4}
"""Tolerance of dithered pictures, whose neighboring pixels differ strongly."""
BROKEN = {name: BAD[name][0] for name in ("cut-jpeg", "cut-png", "cut-webp", "garbage")}


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


@contextmanager
def asking(index: PictureIndex, logs: Path) -> Iterator[tuple[PictureProducers, Producers]]:
    """Start two producers with DALI."""
    with local_producers(producer_command([index.directory], DALI), 2, logs, lambda _text: None) as local:
        yield local, Producers(local.addresses, local.secret, local.problem)


@pytest.mark.slow
def test_bad_files_cost_only_themselves_with_dali(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    index = write_cases(tmp_path / "shards")
    with asking(index, tmp_path / "logs") as (_, producers):

        def ask(bad_pictures: str) -> Pictures:
            with PictureSource(index.digest, FORMAT, producers, bad_pictures) as source:
                return source.patches(range(index.num_samples))

        assert_bad_files_cost_themselves(index, ask, MAX_DIFFERENCE, MAX_DIFFERENCE_OF)


@pytest.mark.slow
def test_dali_samples_are_the_same_after_resumes_and_kills(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "shards")
    tables = shard_tables(directory)
    config = make_config(tables, {"pictures": {**tables["pictures"], "decoder": DALI}})
    before = set(descendants(os.getpid()))

    def opened(producers: Producers) -> tuple[BatchReader, PictureSource]:
        reader = open_reader(config)
        (shards,) = all_shards(reader, ())
        find_decoder(config, [shards], has_begun=False)
        return reader, shards.connect(producers)

    with asking(PictureIndex(directory), tmp_path / "logs") as (_, producers):
        reader, source = opened(producers)
        with source:
            whole = by_sample(read(reader, 0, 24))
            for num_replicas in (2, 4):
                for pid in set(descendants(os.getpid())) - before:
                    os.kill(pid, signal.SIGKILL)
                assert by_sample(read(reader, 0, 24, num_replicas)) == whole
        resumed, source = opened(producers)
        with source:
            assert by_sample(read(resumed, 10, 14, 2)) == {number: whole[number] for number in range(10, 24)}
    assert len({patches for _, _, patches in whole.values()}) == 16
