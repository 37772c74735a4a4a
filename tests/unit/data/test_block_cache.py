"""The cache of remote blocks: any range is that of the source, whatever happens to the cache's files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatrain.data.block_cache import Block, BlockCache

SIZE = 3 * 4096 + 100
CONTENT = np.random.default_rng(1).bytes(SIZE)
BLOCK = Block("s3://bucket/web.bin\netag", 0, SIZE)
RANGES = ((0, SIZE), (0, 1), (4095, 2), (SIZE - 1, 1), (4096, 4096), (5000, 7000))


class Source:
    """Counts the bytes that are read from it."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, offset: int, num_bytes: int) -> bytes:
        self.num_bytes += num_bytes
        return CONTENT[offset : offset + num_bytes]


def cached(cache: BlockCache, source: Source) -> None:
    for offset, num_bytes in RANGES:
        assert cache.read(BLOCK, offset, num_bytes, source) == CONTENT[offset : offset + num_bytes]


def block_file(directory: Path) -> Path:
    return directory / BLOCK.name[:2] / BLOCK.name


def test_a_block_is_read_from_its_source_once(tmp_path: Path) -> None:
    source, cache = Source(), BlockCache(tmp_path, 1 << 20)
    assert not cache.holds(BLOCK)
    cached(cache, source)
    cached(BlockCache(tmp_path, 1 << 20), source)
    assert cache.holds(BLOCK)
    assert source.num_bytes == SIZE
    assert (cache.counts.hits, cache.counts.misses) == (len(RANGES) - 1, 1)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "changed": lambda path: path.write_bytes(bytes(len(path.read_bytes()))),
    "cut short": lambda path: os.truncate(path, 100),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_read_from_its_source_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, cache = Source(), BlockCache(tmp_path, 1 << 20)
    for number in range(3):
        cached(cache, source)
        assert (cache.counts.damaged, source.num_bytes) == (number, (number + 1) * SIZE)
        DAMAGE[damage](block_file(tmp_path))
    assert len(caplog.records) == 1


def test_the_blocks_used_longest_ago_make_room(tmp_path: Path) -> None:
    source, cache = Source(), BlockCache(tmp_path, 3 * (SIZE + 16))
    blocks = [Block("key", number, SIZE) for number in range(5)]
    for number, block in enumerate(blocks[:3]):
        cache.read(block, 0, 1, source)
        os.utime(tmp_path / block.name[:2] / block.name, ns=(number, number))
    cache.read(blocks[0], 0, 1, source)  # used again
    for block in blocks[3:]:
        cache.read(block, 0, 1, source)
    assert [cache.holds(block) for block in blocks] == [True, False, False, True, True]
    assert cache.counts.removed == 2


def test_without_a_disk_the_source_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    source, cache = Source(), BlockCache(tmp_path / "file", 1 << 20)
    cached(cache, source)
    cached(cache, source)
    assert cache.counts.not_stored == 1
    assert source.num_bytes < 4 * SIZE
    assert len(caplog.records) == 1
