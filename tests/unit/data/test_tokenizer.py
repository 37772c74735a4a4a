"""The tokenizer: lossless, deterministic, treats special tokens in the text as text, and is safe to fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.end_of_document import END_OF_DOCUMENT
from megatrain.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.helpers.require import require_module
from tests.helpers.waiting import DEADLINE_S

tokenizers = require_module("tokenizers")

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A tokenizer.json whose end-of-document token has a name that no known model uses."""
    path = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS, 300).save(path)
    path.write_text(path.read_text().replace(END_OF_DOCUMENT, "<|stop|>"))
    return path


def test_unknown_end_of_documents_is_refused_where_needed(odd: Path) -> None:
    tokenizer = load_tokenizer(odd)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    with pytest.raises(DataError, match=r"tokenizer\.json: names no token that ends documents, .*--eod.*eos_token"):
        _ = tokenizer.eod_id
    with pytest.raises(DataError, match=r"tokenizer\.json: has no token '<\|end\|>'"):
        load_tokenizer(odd, "<|end|>")


END_ID = 0
"""The id of the first special token of a trained tokenizer."""


ENDS: list[tuple[str, dict[str, object], str]] = [
    ("<|stop|>", {}, "as given"),
    ("", {"tokenizer_config.json": {"eos_token": "<|stop|>"}}, "eos_token of tokenizer_config.json"),
    ("", {"tokenizer_config.json": {"eos_token": {"content": "<|stop|>"}}}, "eos_token of tokenizer_config.json"),
    ("", {"generation_config.json": {"eos_token_id": END_ID}}, "eos_token_id of generation_config.json"),
    ("", {"generation_config.json": {"eos_token_id": [END_ID, 7]}}, "eos_token_id of generation_config.json"),
    (
        "",
        {"tokenizer_config.json": {"eos_token": "<gone>"}, "generation_config.json": {"eos_token_id": END_ID}},
        "eos_token_id of generation_config.json",
    ),
]


def test_sources_of_the_end_of_documents(odd: Path) -> None:
    for given, files, source in ENDS:
        for name, content in files.items():
            odd.with_name(name).write_text(json.dumps(content))
        tokenizer = load_tokenizer(odd, given)
        assert (tokenizer.end, tokenizer.eod_id, tokenizer.end_source) == ("<|stop|>", END_ID, source), files
        for name in files:
            odd.with_name(name).unlink()


def test_odd_files_beside_a_tokenizer_name_nothing(odd: Path) -> None:
    for content in (
        "", "[]", "{", '{"eos_token": 3}', '{"eos_token_id": true}', '{"eos_token_id": "x"}', "[" * 100_000,
    ):  # fmt: skip
        for name in ("tokenizer_config.json", "generation_config.json"):
            odd.with_name(name).write_text(content)
        assert load_tokenizer(odd).end == "", content[:30]


ENDS_OF_MODELS = {
    "GPT-2": "<|endoftext|>",
    "Llama 3": "<|end_of_text|>",
    "Llama 2 and Mistral": "</s>",
    "Gemma": "<eos>",
    "DeepSeek V3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "Command R": "<|END_OF_TURN_TOKEN|>",
    "Kimi K2": "[EOS]",
}
"""The eos_token of each model's tokenizer_config.json."""


def test_ends_of_known_models_are_found(odd: Path) -> None:
    content = odd.read_text(encoding="utf-8")
    for model, name in ENDS_OF_MODELS.items():
        odd.write_text(content.replace("<|stop|>", name), encoding="utf-8")
        tokenizer = load_tokenizer(odd)
        assert (tokenizer.end, tokenizer.eod_id) == (name, END_ID), model
        assert tokenizer.end_source == "a name that known models use"


def with_tokens(file: Path, *names: str) -> None:
    """Add special tokens, whose ids are 300 and so on, to a tokenizer.json."""
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_special_tokens(list(names))
    backend.save(str(file))


def test_first_of_two_known_ends_is_taken_unless_named(odd: Path) -> None:
    saved = odd.read_text(encoding="utf-8")
    for names, end in {
        ("[EOS]", "<|endoftext|>"): "<|endoftext|>",
        ("<|END_OF_TURN_TOKEN|>", "</s>"): "</s>",
        ("<|end_of_text|>", "<eos>", "</s>"): "<|end_of_text|>",
    }.items():
        odd.write_text(saved, encoding="utf-8")
        with_tokens(odd, *names)
        tokenizer = load_tokenizer(odd)
        assert (tokenizer.end, tokenizer.eod_id) == (end, 300 + names.index(end))
        for given in names:
            assert load_tokenizer(odd, given).eod_id == 300 + names.index(given)
        odd.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": names[0]}))
        assert load_tokenizer(odd).end == names[0]
        odd.with_name("tokenizer_config.json").unlink()


def test_random_and_truncating_options_are_disabled_and_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS, 300).save(path)
    expected = load_tokenizer(path).encode_batch(TEXTS)
    saved = path.read_text()
    options: list[tuple[str, object, str]] = [
        ("truncation", {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}, "truncation"),
        (
            "padding",
            {"strategy": {"Fixed": 900}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
             "pad_type_id": 0, "pad_token": "x"},
            "padding",
        ),
        ("model.dropout", 0.5, "dropout 0.5 of merges"),
        ("model.fuse_unk", True, "fuse_unk"),
    ]  # fmt: skip
    for section, value, note in options:
        content = json.loads(saved)
        *outer, key = section.split(".")
        (content["model"] if outer else content)[key] = value
        path.write_text(json.dumps(content))
        tokenizer = load_tokenizer(path)
        assert [tokenizer.encode_batch(TEXTS) for _ in range(5)] == [expected] * 5, section
        (found,) = tokenizer.notes
        assert found.startswith(note)


def saved_model(path: Path, model: Any) -> Tokenizer:
    """Save a model of the library with words between blanks as a tokenizer.json, and load it."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.decoder = tokenizers.decoders.ByteFallback()
    backend.save(str(path))
    return load_tokenizer(path)


def test_each_unknown_character_keeps_its_own_token(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "<unk>": 2}
    path = tmp_path / "tokenizer.json"
    for is_fused in (True, False):
        tokenizer = saved_model(path, tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=is_fused))
        assert tokenizer.encode("abxyzb xy") == [0, 1, 2, 2, 2, 1, 2, 2]
        assert [note.split(",")[0] for note in tokenizer.notes] == (["fuse_unk"] if is_fused else [])


def test_text_that_a_tokenizer_loses_is_named(tmp_path: Path) -> None:
    models = tokenizers.models
    letters = {"a": 0, "##a": 1, "[UNK]": 2}
    pieces = [("<unk>", 0.0), ("a", -1.0)]
    bytes_of_all = {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    long = "words of more than 7 characters, because of its max_input_chars_per_word"
    lacks = "characters that its vocabulary lacks, such as U+0531, U+A4D0, U+10450, U+13000"
    some = {letter: 2 + number for number, letter in enumerate("\u0531\ua4d0\U00010450")}
    for model, losses in [
        (models.BPE({"a": 0, "<unk>": 1} | bytes_of_all, [], unk_token="<unk>", byte_fallback=True), []),
        (models.BPE({"a": 0, "<unk>": 1} | bytes_of_all, [], unk_token="<unk>", byte_fallback=False), [lacks]),
        (models.BPE({"a": 0}, [], byte_fallback=True), [lacks]),
        (models.BPE({"a": 0} | some, []), ["characters that its vocabulary lacks, such as U+13000"]),
        (models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"), [lacks]),
        (models.Unigram(pieces, 0, byte_fallback=False), [lacks]),
        (models.WordPiece(letters, max_input_chars_per_word=7), [long, lacks]),
    ]:
        found = saved_model(tmp_path / "tokenizer.json", model).losses
        assert [loss.partition(":")[0].partition(", by")[0] for loss in found] == losses, model


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="vocab_size=256 must be at least 257"):
        train_tokenizer(TEXTS, 256)


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'megatrain\[data\]'"):
        train_tokenizer(TEXTS, 300)
