"""A killed build continues where it stopped, with any number of workers: its files are those of a single thread."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data import blocks as blocks_module
from megatrain.data import spool as spool_module
from megatrain.data.build import BuildProgress
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.spool import TokenSpool
from megatrain.data.tokenizing import MAX_THREADS
from tests.helpers.built_data import build_data
from tests.helpers.child_process import in_child
from tests.helpers.require import require_module

require_module("tokenizers")

BLOCK_DOCUMENTS = 7
NUM_BLOCKS = 9
CONTINUED = "continuing a build that was stopped"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of three kinds with empty records between the others, read in small blocks."""
    monkeypatch.setattr(blocks_module, "_BLOCK_DOCUMENTS", BLOCK_DOCUMENTS)
    monkeypatch.setattr(spool_module, "_BLOCKS_BETWEEN_SAVES", 2)
    folder = tmp_path / "source"
    folder.mkdir()
    lines = [
        json.dumps({"text": "" if number % 9 == 4 else f"text {number} " * (number % 5 + 1)}) for number in range(45)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines[:20]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[20:]).encode()))
    for number in range(20):
        (folder / f"c{number:02}.txt").write_text(f"file {number}")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def kill_at(kind: type, method: str, count: int) -> None:
    """Let this process kill itself when `method` has been called `count` times."""
    original: Callable[..., Any] = getattr(kind, method)
    num_calls = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        result = original(*arguments, **named)
        num_calls += 1
        if num_calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(kind, method, counted)


def build(source: Path, output: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    build_data([str(source)], output, **{"tokenizer_path": Path("bytes"), "report": lines.append, **options})
    return lines


@pytest.mark.slow(
    kept=[
        "TokenSpool-add-1-False", "TokenSpool-add-2-True", f"TokenSpool-add-{NUM_BLOCKS}-True",
        "TokenSpool-finish-1-True", "IndexedWriter-add_document-5-True", "IndexedWriter-close-2-True",
    ]
)  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "method", "count", "is_continued"),
    [
        *((TokenSpool, "add", count, count >= 2) for count in range(1, NUM_BLOCKS + 1)),
        (TokenSpool, "finish", 1, True),
        (IndexedWriter, "add_document", 5, True),
        (IndexedWriter, "close", 1, True),
        (IndexedWriter, "close", 2, True),
    ],
)
def test_build_killed_anywhere_gives_the_same_files(
    source: Path, tmp_path: Path, kind: type, method: str, count: int, is_continued: bool
) -> None:
    output = tmp_path / "out"
    build(source, tmp_path / "whole")

    def be_killed() -> None:
        kill_at(kind, method, count)
        build(source, output)

    assert in_child(be_killed) == -signal.SIGKILL
    assert not output.exists()
    lines = build(source, output)
    assert any(CONTINUED in line for line in lines) == is_continued
    assert content(output) == content(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "source", "whole"]


@pytest.mark.slow
def test_build_killed_again_and_again_replaces_the_old(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    build(source, output, seed=5)
    old = content(output)
    build(source, tmp_path / "whole", tokenizer_path=None, vocab_size=300)

    def be_killed() -> None:
        kill_at(TokenSpool, "add", 3)
        build(source, output, tokenizer_path=None, vocab_size=300, is_forced=True)

    while in_child(be_killed) == -signal.SIGKILL:
        assert content(output) == old
        assert len(os.listdir(tmp_path)) == 4
    assert content(output) == content(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "source", "whole"]


@pytest.mark.parametrize("change", ["text", "seed", "file"])
def test_progress_of_another_build_is_removed(source: Path, tmp_path: Path, change: str) -> None:
    def be_killed() -> None:
        kill_at(TokenSpool, "add", 4)
        build(source, tmp_path / "out")

    assert in_child(be_killed) == -signal.SIGKILL
    if change == "text":
        (source / "a.jsonl").write_text('{"text": "changed"}')
    elif change == "file":
        (source / "d.txt").write_text("added")
    options = {"seed": 9} if change == "seed" else {}
    lines = build(source, tmp_path / "out", **options)
    assert not any(CONTINUED in line for line in lines)
    build(source, tmp_path / "whole", **options)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "source", "whole"]


def test_refused_build_removes_what_a_stopped_one_left(source: Path, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("tokenized"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(source, tmp_path / "out", report=interrupt)
    assert len(os.listdir(tmp_path)) == 2
    (source / "z.jsonl").write_text("no JSON")
    with pytest.raises(DataError, match=r"z\.jsonl:1: is not JSON"):
        build(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_build_with_a_truncated_spool_begins_again(source: Path, tmp_path: Path) -> None:
    def be_killed() -> None:
        kill_at(TokenSpool, "add", 4)
        build(source, tmp_path / "out")

    assert in_child(be_killed) == -signal.SIGKILL
    (left,) = tmp_path.glob(".out.part-*")
    os.truncate(left / "kept" / "tokens", 3)
    assert not any(CONTINUED in line for line in build(source, tmp_path / "out"))


@pytest.mark.parametrize(
    ("tokenizer", "num_workers"),
    [(None, 2), (None, 5), (Path("bytes"), 2), pytest.param(None, MAX_THREADS + 1, marks=pytest.mark.slow)],
)
def test_any_number_of_workers_gives_the_same_files(
    source: Path, tmp_path: Path, tokenizer: Path | None, num_workers: int
) -> None:
    build(source, tmp_path / "one", tokenizer_path=tokenizer, vocab_size=300)
    build(source, tmp_path / "several", tokenizer_path=tokenizer, vocab_size=300, num_workers=num_workers)
    assert content(tmp_path / "one") == content(tmp_path / "several")


def test_progress_shows_share_rate_and_time_left() -> None:
    times = iter([0.0, 1.0, 10.0, 12.0, 20.0])
    progress = BuildProgress(4_000_000, 1_000_000, lambda: next(times))
    assert progress.after(1_500_000, 3_000_000, 700_000) is None
    assert progress.after(2_000_000, 2_000_000, 300_000) == (
        "tokenizing: 2 MB of 4 MB (50 %), 500 kB/s of text, 100,000 tokens/s, 20 s left"
    )
    assert progress.after(2_500_000, 0, 0) is None
    line = progress.after(4_000_000, 5_000_000, 1_000_000)
    assert line == "tokenizing: 4 MB of 4 MB (100 %), 500 kB/s of text, 100,000 tokens/s, 0 ms left"
