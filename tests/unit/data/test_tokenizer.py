"""The tokenizer: lossless, deterministic, deaf to special tokens in the text, and safe to fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.tokenizer import END_OF_DOCUMENT, load_tokenizer, train_tokenizer
from tests.helpers.require import require_module
from tests.helpers.waiting import DEADLINE_S

require_module("tokenizers")

TEXTS = [
    "def f(x):\n    return x + 1\n" * 30,
    "the cat sat on the mat, the hat\n" * 30,
    "na\u00efve caf\u00e9 \U0001f600",
]


def test_any_text_comes_back_exactly() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    texts = [*TEXTS, "\x00\x01 unseen \u6f22\u5b57\r\n\t  end ", " leading", ""]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_vocabulary_is_as_asked_and_learning_helps() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_same_text_gives_the_same_file_in_another_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from megatrain.data.tokenizer import train_tokenizer; "
        f"train_tokenizer({TEXTS!r}, 320).save(Path(sys.argv[1]))"
    )
    for hash_seed in ("1", "2"):
        path = tmp_path / f"{hash_seed}.json"
        subprocess.run(
            [sys.executable, "-c", script, path], env={"PYTHONHASHSEED": hash_seed}, check=True, timeout=DEADLINE_S
        )
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()


def test_saved_tokenizer_loads_equal(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.vocab_size, loaded.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_text_that_spells_the_end_of_document_is_only_text() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    ids = tokenizer.encode(f"a {END_OF_DOCUMENT} b")
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == f"a {END_OF_DOCUMENT} b"


def test_a_file_that_truncates_or_adds_tokens_does_not_change_the_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS, 300).save(path)
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


def test_forking_after_a_parallel_batch_does_not_hang() -> None:
    script = f"""
import os
from megatrain.data.tokenizer import train_tokenizer
texts = {TEXTS!r} * 50
tokenizer = train_tokenizer(texts, 300)
expected = tokenizer.encode_batch(texts)
child = os.fork()
if child == 0:
    os._exit(0 if tokenizer.encode_batch(texts) == expected else 1)
print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=DEADLINE_S, capture_output=True, text=True
    )
    assert done.stdout == "0\n", "the child encoded the same, and ended"


def test_bad_tokenizer_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer cannot be read: No such file"):
        load_tokenizer(path)
    path.write_text('{"model": 1}')
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a tokenizer\.json of the tokenizers library"):
        load_tokenizer(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"tokenizer\.json: is not UTF-8"):
        load_tokenizer(path)
    train_tokenizer(TEXTS, 300).save(path)
    path.write_text(path.read_text().replace(END_OF_DOCUMENT, "<|stop|>"))
    with pytest.raises(DataError, match=r"tokenizer\.json: has no end-of-document token; .*<\|endoftext\|>"):
        load_tokenizer(path)


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="vocab_size=256 must be at least 257"):
        train_tokenizer(TEXTS, 256)


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'megatrain\[data\]'"):
        train_tokenizer(TEXTS, 300)
