"""Training data behind URLs: the samples of a local copy, each block fetched once, and faults of the storage."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped, unused-ignore]

from megatrain.config.config import Config
from megatrain.contracts.errors import DataError, UnreachableError
from megatrain.contracts.layout import Layout
from megatrain.data import remote_file
from megatrain.data.bad_tokens import BadTokensError
from megatrain.data.bins import write_bins
from megatrain.data.block_cache import CacheSettings
from megatrain.data.indexed import IndexedDataset, data_path
from megatrain.data.loader.decision import Fill
from megatrain.data.loader.plan import LoaderPlan, loader_plan
from megatrain.data.meta import DataMeta, SplitMeta, read_metas
from megatrain.data.prefetch import Prefetcher
from megatrain.data.readahead import Readahead, readahead
from megatrain.data.reader import BatchReader
from megatrain.data.remote_path import path_or_url
from megatrain.data.verification import verify_data
from megatrain.training.training_data import (
    LONGEST_WAIT_S,
    has_limited_waits,
    open_reader,
    open_validation,
    sample_stream,
    shown_wait,
)
from tests.helpers.host_loading import content, filled_steps, new_ring, read_alone, steps
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import make_config
from tests.helpers.waiting import DEADLINE_S, wait_until
from tests.helpers.watched_store import WatchedStore, watched_store

BLOCK_BYTES = 4096
NUM_TOKENS = {"web": 20_000, "code": 9_001, "held-out": 3_000}
NUM_BLOCKS = {name: -(-2 * num_tokens // BLOCK_BYTES) for name, num_tokens in NUM_TOKENS.items()}
VOCAB_SIZE = 90
NUM_STEPS = 8
TRIES = 3


def threads_of_readahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("data-readahead")]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedStore]:
    monkeypatch.setattr(remote_file, "PAUSES_S", (0.0,) * (TRIES - 1))
    with watched_store(monkeypatch) as store:
        yield store
    for thread in threads_of_readahead():
        thread.join()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    for seed, (name, num_tokens) in enumerate(NUM_TOKENS.items()):
        write_corpus(tmp_path / "local" / name, num_tokens, VOCAB_SIZE, seed)
    return tmp_path / "local"


def config_of(root: object, tmp_path: Path, **data: Any) -> Config:
    """Return the configuration of a mixture whose files are in `root`, a path or a URL."""
    cache = {"cache_directory": str(tmp_path / "cache"), "cache_bytes": 1 << 20, "cache_block_bytes": BLOCK_BYTES}
    return make_config(
        {
            "data": {"train": "", "has_document_mask": True, "readahead_blocks": 4, **cache, **data},
            "data_source": {"path": f"{root}/web", "name": "web", "weight": 3.0},
            "data_source-2": {"path": f"{root}/code", "name": "code", "weight": 2.0},
            "validation_set": {"path": f"{root}/held-out", "name": "held-out"},
        }
    )


def open_remote(store: WatchedStore, tmp_path: Path, name: str = "web") -> IndexedDataset:
    settings = CacheSettings(str(tmp_path / "cache"), 1 << 20, BLOCK_BYTES)
    return IndexedDataset(path_or_url(f"{store.root}/{name}", settings), VOCAB_SIZE)


def read_with_prefetcher(reader: BatchReader, layout: Layout, rank: int, num_blocks: int) -> list[Any]:
    sequence = steps(layout, NUM_STEPS)
    ahead = readahead(reader, sequence, rank, num_blocks)
    with Prefetcher(lambda plan: reader.read_step(plan, rank), sequence.plans(), 2, ahead) as batches:
        return [content(batches.next()) for _ in range(NUM_STEPS)]


@pytest.mark.parametrize("is_file_url", [False, True])
@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_remote_samples_are_those_of_the_local_files(
    packing: str, is_file_url: bool, local: Path, store: WatchedStore, tmp_path: Path
) -> None:
    at_local = config_of(local, tmp_path, packing=packing, balance="cost")
    if packing != "none":
        for name in ("web", "code"):
            write_bins(IndexedDataset(local / name, VOCAB_SIZE), at_local.model.seq_len)
    store.upload(local)
    root, layout = (f"file://{local}" if is_file_url else store.root), Layout(dp_size=2)
    config, whole = config_of(root, tmp_path, packing=packing, balance="cost"), open_reader(at_local)
    # Each rank of a host opens the files by itself.
    readers = [open_reader(config) for _ in range(2)]
    assert [source.identity for reader in readers for source in reader.sources if source] == 2 * [
        source.identity for source in whole.sources if source
    ]
    expected = [
        [content(batch) for batch in read_alone(whole, steps(layout, NUM_STEPS), layout, rank)] for rank in range(2)
    ]
    for num_blocks in (4, 0):
        assert [
            read_with_prefetcher(reader, layout, rank, num_blocks) for rank, reader in enumerate(readers)
        ] == expected

    # the loader of a host, which gets the plan as a file
    plan = loader_plan(
        readers[0], sample_stream(config, readers[0], ()), steps(layout, NUM_STEPS), layout, [0, 1], config.data
    )
    received = LoaderPlan.from_json(plan.to_json().encode(), "plan")
    ring, loader = new_ring(received)
    for step, step_plan_ in filled_steps(received, ring, loader):
        for rank in range(2):
            found = ring.read(received.share_of(rank), step, step_plan_, whole.source_names)
            assert content(found) == expected[rank][step]
    loader.close()

    if not is_file_url:
        for name in ("web", "code"):
            assert store.blocks(f"{name}.bin") == [number * BLOCK_BYTES for number in range(NUM_BLOCKS[name])]
            assert store.blocks(f"{name}.idx") == [0]


def test_validation_and_verification_read_urls(local: Path, store: WatchedStore, tmp_path: Path) -> None:
    store.upload(local)
    (at_local,) = open_validation(config_of(local, tmp_path))
    (remote,) = open_validation(config_of(store.root, tmp_path))
    assert (remote.digest, remote.num_samples) == (at_local.digest, at_local.num_samples)
    settings = CacheSettings(str(tmp_path / "cache"), 1 << 20, BLOCK_BYTES)
    found = verify_data(path_or_url(store.root, settings), VOCAB_SIZE)
    assert [replace(pair, prefix="") for pair in found] == [
        replace(pair, prefix="") for pair in verify_data(local, VOCAB_SIZE)
    ]
    store.put("web.bin", bytes(2 * NUM_TOKENS["web"] - 2) + b"\xff\xff")
    (pair,) = verify_data(path_or_url(f"{store.root}/web", settings), VOCAB_SIZE)
    assert (pair.problems[0].file, pair.problems[0].offset) == (f"{store.root}/web.bin", 2 * NUM_TOKENS["web"] - 2)


def test_cache_smaller_than_the_data_holds_its_bound(local: Path, store: WatchedStore, tmp_path: Path) -> None:
    store.upload(local)
    settings = CacheSettings(str(tmp_path / "cache"), 4 * (BLOCK_BYTES + 4), BLOCK_BYTES)
    dataset = IndexedDataset(path_or_url(f"{store.root}/web", settings), VOCAB_SIZE)
    expected = IndexedDataset(local / "web")
    for start in [0, 19_000, 7, 10_000, 5_000, 15_000, 2_047, 0, 19_000]:
        assert dataset.window(start, 1000).tolist() == expected.window(start, 1000).tolist()
        assert sum(path.stat().st_size for path in settings.resolved_directory.glob("??/*")) <= settings.max_bytes
    assert len(store.blocks("web.bin")) > len(set(store.blocks("web.bin")))


def change(store: WatchedStore, at: int, num_bytes: int) -> None:
    """Replace web.bin while block `at` is read."""

    def fault(name: str) -> None:
        if len(store.blocks("web.bin")) == at:
            store.put("web.bin", bytes(num_bytes))

    store.fault = fault


FINAL: dict[str, tuple[Callable[[WatchedStore], None], str]] = {
    "changed": (lambda store: store.put("web.bin", bytes(40_000)), "was changed while it was read: had 40000 bytes "),
    "changed during the read": (lambda store: change(store, 1, 40_000), "was changed while it was read"),
    "shorter": (lambda store: store.put("web.bin", bytes(100)), r"was changed while .* has 100 bytes"),
    "removed": (lambda store: store.remove("web.bin"), "was removed while it was read; restore it"),
    "denied": (lambda store: setattr(store, "fault", lambda name: PermissionError()), "Permission denied; check URL"),
}


@pytest.mark.parametrize("fault", FINAL)
def test_fault_of_a_whole_object_ends_the_run(fault: str, local: Path, store: WatchedStore, tmp_path: Path) -> None:
    store.upload(local)
    dataset = open_remote(store, tmp_path)
    cached = dataset.window(0, 100).tolist()
    store.ranges.clear()
    FINAL[fault][0](store)
    with pytest.raises(DataError, match=FINAL[fault][1]) as caught:
        dataset.window(5000, 100)
    # It is not a sample that could be replaced, and a second try would not help.
    assert not isinstance(caught.value, BadTokensError)
    assert str(caught.value).startswith(f"{store.root}/web.bin")
    assert len(store.ranges) == 1
    # Earlier reads were of the version that was opened.
    assert dataset.window(0, 100).tolist() == cached
    if "changed" in fault:
        store.fault = lambda name: None
        assert not open_remote(store, tmp_path).window(0, 10_000).any()


def test_reads_are_repeated_while_the_storage_fails(local: Path, store: WatchedStore, tmp_path: Path) -> None:
    store.upload(local)
    dataset, expected = open_remote(store, tmp_path), IndexedDataset(local / "web").window(5000, 100)
    store.ranges.clear()
    store.fault = lambda name: ConnectionResetError("reset") if len(store.ranges) < TRIES else None
    assert dataset.window(5000, 100).tolist() == expected.tolist()
    assert len(store.ranges) == TRIES


def test_only_reads_of_remote_files_have_a_limit(local: Path, store: WatchedStore, tmp_path: Path) -> None:
    store.upload(local)
    at_local, remote = (open_reader(config_of(root, tmp_path)) for root in (local, store.root))
    mixed = replace(remote, sources=(at_local.sources[0], remote.sources[1]))
    assert [has_limited_waits(reader) for reader in (at_local, mixed, remote)] == [False, False, True]

    shown: list[str] = []
    for name, reader in (("local", at_local), ("remote", remote)):
        times_s = iter([100.0, 100.5, 100.0 + LONGEST_WAIT_S - 1, 100.0 + LONGEST_WAIT_S])
        show = shown_wait(reader, partial(shown.append, name), lambda: next(times_s))  # noqa: B023 -- used at once
        for _ in range(3):
            show()
    assert shown == ["remote", "remote"], "longer than any read: something else hangs"


def test_unreachable_storage_is_no_bad_sample(local: Path, store: WatchedStore, tmp_path: Path) -> None:
    store.upload(local)
    config = config_of(store.root, tmp_path, bad_samples="replace", readahead_blocks=0)
    reader, layout = open_reader(config), Layout()
    (plan, *_) = steps(layout, 1).plans()
    (tmp_path / "cache").rename(tmp_path / "lost")
    store.ranges.clear()
    store.fault = lambda name: ConnectionResetError("reset") if name.endswith(".bin") else None
    with pytest.raises(
        UnreachableError, match=rf"\.bin at byte \d+: cannot be read, after {TRIES} tries: .*reset"
    ) as at:
        reader.read_step(plan, 0)
    assert str(at.value).startswith(f"{store.root}/")
    assert len(store.ranges) == TRIES

    # The rank raises the same error if the loader of its host has read.
    host = replace(config, data=replace(config.data, bad_samples="refuse"))
    host_plan = loader_plan(reader, sample_stream(host, reader, ()), steps(layout, 1), layout, [0], host.data)
    ring, loader = new_ring(host_plan, lambda: replace(reader, replaces_bad_samples=False))
    loader.fill(Fill(0, 0))
    loader.close()
    with pytest.raises(UnreachableError, match=r"after 3 tries"):
        ring.read(0, 0, plan, reader.source_names)

    store.fault = lambda name: ConnectionResetError("reset")
    with pytest.raises(UnreachableError, match=r"web.idx at byte 0: cannot be read, after"):
        open_remote(store, tmp_path / "another")


def test_metas_behind_urls_are_read_at_the_same_time(store: WatchedStore, tmp_path: Path) -> None:
    settings, at_once = CacheSettings(str(tmp_path / "cache"), 1 << 20, BLOCK_BYTES), threading.Barrier(3)
    split = SplitMeta(1, 2, 3, "", "")
    metas = [DataMeta(("web",), None, 0, 0.5, size, 0, "", 1.0, {}, split, split) for size in (300, 400, 500)]
    for meta in metas:
        store.put(f"{meta.vocab_size}/meta.json", meta.to_json().encode())

    def together(name: str) -> None:
        at_once.wait(DEADLINE_S)

    store.fault = together
    prefixes = {
        f"{number}": path_or_url(f"{store.root}/{meta.vocab_size}/{name}", settings)
        for number, (meta, name) in enumerate(itertools.product(metas, ("train", "validation")))
    }
    assert list(read_metas(prefixes).values()) == [meta for meta in metas for _ in range(2)]
    assert len(store.ranges) == 3


def test_missing_permission_to_list_is_named(
    local: Path, store: WatchedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.upload(local)
    info = MemoryFileSystem.info

    def refused(self: MemoryFileSystem, path: str, **more: Any) -> Any:
        try:
            return info(self, path, **more)
        except FileNotFoundError as error:  # as S3 does
            raise PermissionError("Forbidden") from error

    monkeypatch.setattr(MemoryFileSystem, "info", refused)
    expected = r"meta.json: cannot be read: Permission denied; .* without the permission to list \(s3:ListBucket\), a "
    with pytest.raises(DataError, match=expected):
        open_reader(config_of(store.root, tmp_path))


def test_missing_objects_and_drivers_are_named(store: WatchedStore, tmp_path: Path, local: Path) -> None:
    store.upload(local)
    store.remove("code.bin")
    for name, text in (
        ("none", "none.idx: cannot be read: No such file"),
        ("code", "code.bin: cannot be read: No such"),
    ):
        with pytest.raises(DataError, match=text):
            open_remote(store, tmp_path, name)
    settings = CacheSettings(str(tmp_path), 1 << 20, BLOCK_BYTES)
    for url, text in (("s3://me:secret@bucket/web", "a password in a URL"), ("nothing://x/web", "nothing")):
        with pytest.raises(DataError, match=text):
            path_or_url(url, settings)
    assert path_or_url("data/web", settings) == Path("data/web")


def wait_for_reads(store: WatchedStore, count: int) -> None:
    wait_until(lambda: len(store.ranges) >= count, "the blocks")


def test_readahead_fetches_in_order_and_not_too_far(local: Path, store: WatchedStore, tmp_path: Path) -> None:
    store.upload(local)
    dataset = open_remote(store, tmp_path)
    store.ranges.clear()
    blocks = list(dataset.remote_blocks(0, NUM_TOKENS["web"]))
    # Steps 0 to 3 need no block, two, one of them again, and the others.
    coming = [[], [blocks[3], blocks[1]], [blocks[1]], blocks[4:9], blocks[9:]]
    ahead = Readahead(coming, num_blocks=1)
    for step, expected in ((None, [3]), (1, [3, 1]), (2, [3, 1, 4]), (3, [3, 1, 4, 5, 6, 7, 8, 9])):
        if step is not None:
            ahead.advance(step)
        wait_for_reads(store, len(expected))
        assert [start // BLOCK_BYTES for _, start, _ in store.ranges] == expected
    ahead.close()
    for thread in threads_of_readahead():
        thread.join()
    assert len(store.ranges) == 8


def test_a_tail_of_a_file_is_a_shorter_block(local: Path, store: WatchedStore, tmp_path: Path) -> None:
    store.upload(local)
    dataset = open_remote(store, tmp_path, "code")
    assert data_path(dataset.prefix).name == "code.bin"
    assert len(dataset.window(NUM_TOKENS["code"] - 5, 100)) == 5
    last = (NUM_BLOCKS["code"] - 1) * BLOCK_BYTES
    assert store.ranges[-1] == ("code.bin", last, 2 * NUM_TOKENS["code"])
