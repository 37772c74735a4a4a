"""The cache of remote blocks: any range equals that of the source, whatever happens to the cache's files."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from megatrain.contracts.errors import DataError, UnreachableError
from megatrain.contracts.files.file_locks import wait_and_lock
from megatrain.data.block_cache import BlockCache, CacheSettings, FileBlock
from megatrain.data.cache_use import CacheUse
from tests.helpers.child_process import in_child
from tests.helpers.small_disk import small_disk
from tests.helpers.waiting import DEADLINE_S

SIZE = 3 * 4096 + 100
STORED = SIZE + 4 * 4
"""The bytes of a block's file, including the checksums of its pages."""
CONTENT = np.random.default_rng(1).bytes(SIZE)
BLOCK = FileBlock("s3://bucket/web.bin\netag", 0, SIZE)
RANGES = ((0, SIZE), (0, 1), (4095, 2), (SIZE - 1, 1), (4096, 4096), (5000, 7000))


class Source:
    """Records the ranges that are read from it. Every file has the same content."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.ranges)

    def __call__(self, offset: int, num_bytes: int) -> bytes:
        self.ranges.append((offset, num_bytes))
        return CONTENT[offset : offset + num_bytes]


def cache_in(directory: Path, max_bytes: int = 1 << 20) -> BlockCache:
    return BlockCache(CacheSettings(str(directory), max_bytes, SIZE))


def own(directory: Path) -> Path:
    return CacheSettings(str(directory), 0, 0).resolved_directory


def block_file(directory: Path, block: FileBlock = BLOCK) -> Path:
    return own(directory) / block.name[:2] / block.name


def stored(directory: Path) -> dict[str, int]:
    """Return the sizes of all files of data, complete or not, by name."""
    return {path.name: path.stat().st_size for path in own(directory).glob("??/*")} | {
        path.name: path.stat().st_size for path in own(directory).glob("??/.*")
    }


def read_ranges(cache: BlockCache, source: Source) -> None:
    for offset, num_bytes in RANGES:
        assert cache.read(BLOCK, offset, num_bytes, source) == CONTENT[offset : offset + num_bytes]


def test_a_block_is_read_from_its_source_once(tmp_path: Path) -> None:
    source, cache = Source(), cache_in(tmp_path)
    read_ranges(cache, source)
    cache.read(BLOCK, 0, 0, source)
    read_ranges(again := cache_in(tmp_path), source)
    assert source.ranges == [(0, SIZE)]
    num_read = sum(num_bytes for _, num_bytes in RANGES)
    assert cache.use == CacheUse(hit_bytes=num_read - SIZE, fetched_bytes=SIZE)
    assert again.use == CacheUse(hit_bytes=num_read)


def test_threads_read_a_block_from_its_source_once(tmp_path: Path) -> None:
    source, blocks = Source(), [FileBlock("key", 0, SIZE - number) for number in range(20)]
    caches = [cache_in(tmp_path, 20 * STORED) for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        for cache in caches:
            for block in blocks:
                threads.submit(cache.read, block, 10, 20, source)
    assert sorted(source.ranges) == sorted((0, block.num_bytes) for block in blocks)


def test_a_read_that_is_repeated_holds_up_no_other_block(tmp_path: Path) -> None:
    cache, may_end, has_begun = cache_in(tmp_path, 1 << 22), threading.Event(), threading.Event()
    # Blocks of all names, as far as their first two digits distinguish them.
    others = [FileBlock(f"key {number}", 0, SIZE) for number in range(1000)]
    same = [block for block in others if block.name[:2] == BLOCK.name[:2]]

    def slow(offset: int, num_bytes: int) -> bytes:
        has_begun.set()
        may_end.wait()
        return CONTENT[offset : offset + num_bytes]

    with ThreadPoolExecutor(3) as threads:
        try:
            first = threads.submit(cache.read, BLOCK, 0, 1, slow)
            assert has_begun.wait(DEADLINE_S)
            second, source = threads.submit(cache.read, BLOCK, 0, 1, Source()), Source()
            assert len(same) > 1
            for block in same:
                assert threads.submit(cache.read, block, 0, 1, source).result(DEADLINE_S) == CONTENT[:1]
            assert not second.done()
        finally:
            may_end.set()
        assert first.result(DEADLINE_S) == second.result(DEADLINE_S) == CONTENT[:1]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "changed": lambda path: path.write_bytes(bytes(len(path.read_bytes()))),
    "cut short": lambda path: os.truncate(path, 100),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_block_is_read_from_its_source_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, cache = Source(), cache_in(tmp_path)
    for number in range(3):
        read_ranges(cache, source)
        assert source.ranges == [(0, SIZE)] * (number + 1)
        DAMAGE[damage](block_file(tmp_path))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_the_blocks_used_longest_ago_make_room(tmp_path: Path, num_bytes: int) -> None:
    source, cache = Source(), cache_in(tmp_path, 3 * STORED)
    blocks = [FileBlock(f"key {number}", 0, SIZE) for number in range(5)]
    for number, block in enumerate(blocks[:3]):
        cache.read(block, 0, 1, source)
        os.utime(block_file(tmp_path, block), ns=(number, number))
    cache.read(blocks[0], 0, num_bytes, source)
    for block in blocks[3:]:
        cache.read(block, 0, 1, source)
    assert [block_file(tmp_path, block).exists() for block in blocks] == [True, False, False, True, True]
    assert cache.use == CacheUse(hit_bytes=num_bytes, fetched_bytes=5 * SIZE, evicted_bytes=2 * STORED)


def test_blocks_never_exceed_the_bound(tmp_path: Path) -> None:
    """The same with several processes, with other files, and with a smaller bound than before."""
    source = Source()
    for max_bytes in (20 * STORED, 5 * STORED + 7, STORED - 1):
        caches = [cache_in(tmp_path, max_bytes) for _ in range(2)]
        for number in range(30):
            block = FileBlock(f"{max_bytes}", 0, SIZE - number)
            assert caches[number % 2].read(block, 5, 6, source) == CONTENT[5:11]
            if number > 1:  # The first block of the last size does not fit.
                assert sum(stored(tmp_path).values()) <= max_bytes
        assert sum(stored(tmp_path).values()) > max_bytes // 2 or max_bytes < STORED


def test_a_whole_file_is_mapped_and_outlives_its_removal(tmp_path: Path) -> None:
    source, cache = Source(), cache_in(tmp_path)
    found = [cache.whole(BLOCK, source), cache.whole(BLOCK, source)]
    assert source.num_bytes == SIZE
    assert cache.use == CacheUse(hit_bytes=SIZE, fetched_bytes=SIZE)
    for name in stored(tmp_path):
        (own(tmp_path) / name[:2] / name).unlink()
    assert [bytes(one) for one in found] == [CONTENT, CONTENT]
    assert cache.whole(FileBlock("empty", 0, 0), source) == b""


def test_a_mapped_file_stays_and_is_counted(tmp_path: Path) -> None:
    source, cache = Source(), cache_in(tmp_path, 3 * STORED)
    path = block_file(tmp_path).with_suffix(".whole")
    mapped = [cache.whole(BLOCK, source)]
    os.utime(path, ns=(1, 1))
    for number in range(8):
        if number == 4:
            assert path.exists()
            mapped.clear()
        cache.read(FileBlock(f"key {number}", 0, SIZE), 0, 1, source)
        assert sum(stored(tmp_path).values()) <= 3 * STORED
    assert not path.exists()


def test_files_being_written_count_for_the_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_in(tmp_path, 2 * STORED)
    unfinished = own(tmp_path) / "00" / ".other.00000000.tmp"
    unfinished.parent.mkdir()
    with unfinished.open("wb") as file:
        file.truncate(STORED + 1)
        wait_and_lock(file.fileno())
        assert cache.read(BLOCK, 5, 6, Source()) == CONTENT[5:11]
    assert stored(tmp_path) == {unfinished.name: STORED + 1}
    assert "files that are in use or incomplete take the rest of data.cache_bytes" in caplog.text


def test_without_a_disk_the_source_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, cache = Source(), cache_in(tmp_path)
    own(tmp_path).rmdir()
    own(tmp_path).touch()
    read_ranges(cache, source)
    read_ranges(cache, source)
    # The first miss requests a whole block.
    assert source.ranges == [(0, SIZE), *RANGES[1:], *RANGES]
    assert bytes(cache.whole(BLOCK, source)) == CONTENT
    assert len(caplog.records) == 1


def test_full_disk_loses_nothing_and_is_used_when_it_has_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 128 << 10) as disk:
        directory, source, other = disk.seen / "cache", Source(), FileBlock("other", 0, SIZE)
        cache = cache_in(directory)
        assert cache.read(other, 5, 6, source) == CONTENT[5:11]
        disk.fill()
        read_ranges(cache, source)
        assert source.ranges == [(0, SIZE), (0, SIZE), *RANGES[1:]]
        assert cache.read(other, 5, 6, source) == CONTENT[5:11]
        assert bytes(cache.whole(BLOCK, source)) == CONTENT
        assert stored(directory) == {other.name: STORED}
        assert len(caplog.records) == 1
        assert cache.use.num_not_stored == 2, "the block once, then no more tries, and the whole file"
        assert cache.use.fetched_bytes == source.num_bytes
        disk.free_space()
        for _ in range(12):
            read_ranges(cache, source)
        assert stored(directory) == {other.name: STORED, BLOCK.name: STORED}


def test_a_file_larger_than_the_cache_is_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_in(tmp_path, SIZE - 1)
    assert bytes(cache.whole(BLOCK, Source())) == CONTENT
    assert stored(tmp_path) == {}
    assert f"its {SIZE} bytes are more than data.cache_bytes" in caplog.text


def test_a_source_that_fails_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    def fail(offset: int, num_bytes: int) -> bytes:
        raise UnreachableError("s3://bucket/web.bin: cannot be read")

    cache = cache_in(tmp_path)
    attempts: tuple[Callable[[], object], ...] = (
        lambda: cache.read(BLOCK, 0, 1, fail),
        lambda: cache.whole(BLOCK, fail),
    )
    for attempt in attempts:
        with pytest.raises(UnreachableError):
            attempt()
    assert stored(tmp_path) == {}
    read_ranges(cache, source := Source())
    assert source.ranges == [(0, SIZE)]


def test_a_directory_that_others_can_change_is_refused(tmp_path: Path) -> None:
    cache_in(tmp_path)
    own(tmp_path).chmod(0o777)
    with pytest.raises(DataError, match=r"cannot be used as the cache of remote data: has mode 777, expected 700"):
        cache_in(tmp_path)


class Killer:
    """Kills its process at line number `lives` that the cache executes. `num_lines`: the lines so far."""

    def __init__(self, lives: int) -> None:
        self.num_lines, self._lives = 0, lives

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.endswith("block_cache.py"):
            self.num_lines += event == "line"
            if self.num_lines == self._lives:
                os.kill(os.getpid(), signal.SIGKILL)
            return self
        return None


def use(directory: Path) -> None:
    cache = cache_in(directory, 2 * STORED)
    cache.read(FileBlock("other", 0, SIZE), 0, 1, Source())
    cache.read(BLOCK, 0, 1, Source())
    cache.whole(BLOCK, Source())


@pytest.mark.slow
def test_cache_is_valid_after_a_kill_at_any_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counting = Killer(-1)
    sys.settrace(counting)
    try:
        use(tmp_path / "whole")
    finally:
        sys.settrace(None)
    assert counting.num_lines > 100
    for lives in range(1, counting.num_lines, 3):

        def act(lives: int = lives) -> None:
            sys.settrace(Killer(lives))
            use(tmp_path / "cache")

        assert in_child(act) == -signal.SIGKILL
        cache, source = cache_in(tmp_path / "cache", 2 * STORED), Source()
        read_ranges(cache, source)
        assert bytes(cache.whole(BLOCK, source)) == CONTENT
        assert not caplog.records
        assert sum(stored(tmp_path / "cache").values()) <= 2 * STORED, lives
    for number in range(3):
        cache.read(FileBlock(f"last {number}", 0, SIZE), 0, 1, Source())
    assert not [name for name in stored(tmp_path / "cache") if name.startswith(".")]
