"""The place of tokenization: in threads of this process, or in separate processes."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatrain.data.blocks import BLOCK_BYTES, DocumentBlock
from megatrain.data.corpus import CorpusDocument, CorpusPosition
from megatrain.data.tokenizer import TokenizerSource, byte_tokenizer, load_tokenizer, train_tokenizer
from megatrain.data.tokenizing import MAX_THREADS, default_workers, tokenized
from tests.helpers.processes import ChildProcesses
from tests.helpers.require import require_module
from tests.helpers.sentencepiece_model import sentencepiece_model
from tests.helpers.waiting import DEADLINE_S

tokenizers = require_module("tokenizers")

VARIABLE = "TOKENIZERS_PARALLELISM"


@pytest.fixture
def source(tmp_path: Path) -> TokenizerSource:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["a text", "another text"], 300).save(path)
    return TokenizerSource(path)


def block(number: int) -> DocumentBlock:
    document = CorpusDocument("a.txt", number, f"text {number}", num_bytes=6, file=0)
    return DocumentBlock((document,), CorpusPosition(0, number + 1), {}, 0)


def test_threads_encode_at_the_same_time_in_one_process(source: TokenizerSource) -> None:
    """A thread that encodes waits for another thread that does."""
    tokenizer = source.load()
    meet, encode = threading.Barrier(2, timeout=DEADLINE_S), tokenizer.encode_batch
    names: Counter[str] = Counter()

    def encode_with_another(texts: Sequence[str]) -> list[list[int]]:
        names[threading.current_thread().name] += 1
        assert os.environ[VARIABLE] == "false"
        meet.wait()
        return encode(texts)

    tokenizer.encode_batch = encode_with_another  # type: ignore[method-assign]
    children = ChildProcesses()
    numbers = []
    for done, _ in tokenized(map(block, range(6)), tokenizer, source, 1, 2):
        assert children.running() == set()
        numbers.append(done.documents[0].record)
    assert numbers == list(range(6))
    assert len(names) == 2


@pytest.mark.parametrize("before", [None, "true"])
def test_threads_of_the_library_are_off_while_tokenizing(
    source: TokenizerSource, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, before)
    results = tokenized(map(block, range(4)), source.load(), source, 1, 1)
    next(results)
    assert os.environ[VARIABLE] == "false"
    results.close()
    assert os.environ.get(VARIABLE) == before


def test_encoder_that_holds_the_lock_gets_processes() -> None:
    children = ChildProcesses()
    results = tokenized(map(block, range(6)), byte_tokenizer(), TokenizerSource(None), 1, 2)
    next(results)
    assert len(children.running()) == 2
    results.close()
    assert children.running() == set()


def test_default_workers_follow_text_and_cores(source: TokenizerSource) -> None:
    threads, processes = source.load(), byte_tokenizer()
    assert default_workers(0, 64, threads) == default_workers(0, 64, processes) == 1
    assert default_workers(10**12, 2, threads) == default_workers(10**12, 2, processes) == 2
    assert default_workers(10**12, 64, threads) == default_workers(10**12, 64, processes) == 64
    assert default_workers(3 * BLOCK_BYTES, 64, threads) == 4
    assert default_workers(3 * BLOCK_BYTES, 64, processes) == 1
    assert default_workers(50_000_000, 64, threads) == MAX_THREADS
    assert default_workers(50_000_000, 64, processes) == 7


@pytest.mark.parametrize("kind", ["tokenizers", "sentencepiece"])
def test_encoder_in_threads_releases_the_lock(kind: str, source: TokenizerSource, tmp_path: Path) -> None:
    """A thread that waits for the lock gets it while another thread encodes, and only then: no other code releases
    it."""
    path = source.path
    if kind == "sentencepiece":
        path = tmp_path / "tokenizer.model"
        path.write_bytes(sentencepiece_model())
    assert path is not None
    tokenizer = load_tokenizer(path)
    assert tokenizer.runs_in_threads
    may_look, seen = threading.Event(), []
    is_encoding = False

    def look() -> None:
        may_look.wait()
        seen.append(is_encoding)

    interval = sys.getswitchinterval()
    looker = threading.Thread(target=look)
    looker.start()
    sys.setswitchinterval(1e6)
    try:
        is_encoding = True
        may_look.set()
        for _ in range(100):
            tokenizer.encode_batch(["a text and another text " * 10_000])
            if seen:
                break
        is_encoding = False
    finally:
        sys.setswitchinterval(interval)
        looker.join()
    assert seen == [True]
