"""Training data on an S3 server: requests that fail, the number of requests, and changed content under the same
name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import fsspec
import pytest

from megatrain.contracts.errors import DataError
from megatrain.data import remote_file
from megatrain.data.block_cache import CacheSettings
from megatrain.data.indexed import IndexedDataset
from megatrain.data.remote_file import fetch_together
from megatrain.data.remote_path import path_or_url
from megatrain.data.verification import verify_data
from tests.helpers.s3_server import Fault, s3_server
from tests.helpers.tiny_data import write_corpus

NUM_TOKENS = 20_000
NUM_BLOCKS = 10


@pytest.mark.slow
def test_tokens_on_s3_are_those_of_the_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "PAUSES_S", (0.0, 0.0))
    expected = IndexedDataset(write_corpus(tmp_path / "local" / "web", NUM_TOKENS, 90))
    settings = CacheSettings(str(tmp_path), 1 << 20, 4096)
    requests: Counter[tuple[str, str]] = Counter()

    def refuse_some(method: str, key: str) -> Fault | None:
        requests[method, key] += 1
        return Fault.REFUSED if requests[method, key] in (2, 5) else None

    with s3_server(monkeypatch) as server:
        store = fsspec.filesystem("s3")
        store.put(f"{tmp_path}/local/", "bucket/corpus/", recursive=True)
        url = path_or_url("s3://bucket/corpus/web", settings)
        server.hook = refuse_some
        dataset = IndexedDataset(url)
        fetch_together(dataset.remote_blocks(0, NUM_TOKENS))
        assert dataset.read_tokens(0, NUM_TOKENS).tolist() == expected.read_tokens(0, NUM_TOKENS).tolist()
        # Two of the reads were refused, and those whose look-ups were refused were repeated.
        assert NUM_BLOCKS + 2 <= requests["GET", "corpus/web.bin"] <= NUM_BLOCKS + 4

        server.hook = lambda method, key: requests.update([(method, key)])
        requests.clear()
        assert not any(pair.problems for pair in verify_data(path_or_url("s3://bucket/corpus", settings), 90))
        assert requests["GET", "corpus/web.bin"] == requests["GET", "corpus/web.idx"] == 0

        store.pipe_file("bucket/corpus/web.bin", bytes(2 * NUM_TOKENS))
        another = IndexedDataset(path_or_url("s3://bucket/corpus/web", settings))
        assert not another.read_tokens(0, NUM_TOKENS).any()
        store.rm_file("bucket/corpus/web.bin")
        with pytest.raises(DataError, match=r"s3://bucket/corpus/web.bin: cannot be read: No such file"):
            IndexedDataset(url)
        with pytest.raises(DataError, match=r"s3://nobucket/web.idx: cannot be read: No such file"):
            IndexedDataset(path_or_url("s3://nobucket/web", settings))
