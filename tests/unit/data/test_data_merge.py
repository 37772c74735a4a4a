"""Merged data have the documents of all inputs in order; Megatron-Core's own builder writes the same files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.dataset import open_dataset
from megatrain.data.indexed import IndexedDataset
from megatrain.data.indexed_writer import IndexedWriter
from megatrain.data.merge import merge
from megatrain.data.meta import read_meta
from megatrain.data.verification import verify_data
from tests.helpers.built_data import build_data
from tests.helpers.child_process import in_child
from tests.helpers.require import require_module

require_module("tokenizers")


def built(tmp_path: Path, name: str, num_documents: int, key: str = "text") -> Path:
    source = tmp_path / f"{name}.jsonl"
    lines = [json.dumps({key: f"{name} {number}" if number else ""}) for number in range(num_documents + 1)]
    source.write_text("\n".join(lines))
    build_data([str(source)], tmp_path / name, tokenizer_path=Path("bytes"), validation_fraction=0.2, text_key=key)
    return tmp_path / name


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(number).tolist() for number in range(dataset.num_documents)]


def test_joined_directories_are_one_sound_directory(tmp_path: Path) -> None:
    inputs = [built(tmp_path, "a", 30), built(tmp_path, "b", 17)]
    output = tmp_path / "both"
    meta = merge(inputs, output)
    for split in ("train", "validation"):
        assert documents(output / split) == documents(inputs[0] / split) + documents(inputs[1] / split)
    assert meta is not None
    assert meta == read_meta(output / "meta.json")
    assert meta.train.documents + meta.validation.documents == 47
    assert meta.skipped == {"empty records": 2}
    assert [Path(source).name for source in meta.sources] == ["a.jsonl", "b.jsonl"]
    assert not any(pair.problems for pair in verify_data(output))
    assert open_dataset(output / "train", 257)[0].num_documents == meta.train.documents
    assert sorted(os.listdir(output)) == sorted(os.listdir(inputs[0]))


def test_text_key_of_unlike_inputs_is_none(tmp_path: Path) -> None:
    one, other = built(tmp_path, "a", 9, "body"), built(tmp_path, "b", 9)
    unlike = tmp_path / "unlike"
    for inputs, name, expected in (
        ([one, one], "alike", "body"), ([one, other], "unlike", None), ([other, unlike], "more", None),
    ):  # fmt: skip
        meta = merge(inputs, tmp_path / name)
        assert meta is not None
        assert meta == read_meta(tmp_path / name / "meta.json")
        assert meta.text_key == expected


def test_joined_pairs_keep_sequences_and_widen_ids(tmp_path: Path, write_tokens: Callable[..., Path]) -> None:
    first = write_tokens([[1, 2, 3], [], [4]], "first")
    second = write_tokens([[70_000], [5, 6]], "second", 128_256)
    assert merge([first, second, first], tmp_path / "out") is None
    dataset = IndexedDataset(tmp_path / "out" / "train")
    assert dataset.dtype == np.int32
    assert documents(dataset.prefix) == [[1, 2, 3], [], [4], [70_000], [5, 6], [1, 2, 3], [], [4]]
    assert sorted(os.listdir(tmp_path / "out")) == ["train.bin", "train.idx"]


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path, write_tokens: Callable[..., Path]) -> None:
    one = built(tmp_path, "a", 9)
    other = built(tmp_path, "b", 9)
    pair = write_tokens([[1]], "pair")
    with pytest.raises(DataError, match=r"pair: is not a directory, but other inputs are"):
        merge([one, pair], tmp_path / "out")
    (other / "meta.json").write_text(
        (other / "meta.json").read_text().replace('"tokenizer_sha256": "', '"tokenizer_sha256": "f')
    )
    with pytest.raises(DataError, match=r"input 2='.*b/train': its tokens were made with another tokenizer"):
        merge([one, other], tmp_path / "out")
    (other / "meta.json").unlink()
    with pytest.raises(DataError, match=r"b: has no meta\.json, so it is not a data directory"):
        merge([one, other], tmp_path / "out")
    with pytest.raises(DataError, match="a: already holds a data set"):
        merge([one, one], one)
    assert not (tmp_path / "out").exists()


def test_merge_that_is_killed_leaves_the_old(tmp_path: Path) -> None:
    one, other = built(tmp_path, "a", 9), built(tmp_path, "b", 9)
    output = tmp_path / "out"
    merge([one, one], output)
    before = documents(output / "train")

    def be_killed() -> None:
        close = IndexedWriter.close

        def killing(writer: IndexedWriter) -> None:
            close(writer)
            os.kill(os.getpid(), signal.SIGKILL)

        IndexedWriter.close = killing  # type: ignore[method-assign]
        merge([one, other], output, is_forced=True)

    assert in_child(be_killed) == -signal.SIGKILL
    assert documents(output / "train") == before
    merge([one, other], output, is_forced=True)
    assert documents(output / "train") == documents(one / "train") + documents(other / "train")
    assert not list(tmp_path.glob(".out.part-*"))
