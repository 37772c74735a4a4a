"""The tokenizer of an exported directory, as transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.contracts.errors import CheckpointError
from megatrain.data.end_of_document import END_OF_DOCUMENT
from megatrain.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from megatrain.hf import ExportReport, TokenizerFile, export_model
from tests.helpers.hf_models import random_parameters, tiny
from tests.helpers.require import lazy_module, require_module
from tests.helpers.sentencepiece_model import sentencepiece_model

require_module("safetensors")
tokenizers = require_module("tokenizers")
transformers = lazy_module("transformers")

TEXTS = [
    "It is a truth universally acknowledged, that",
    "  two  spaces , a comma .",
    "l'\u00e9t\u00e9\n\n\u96ea 12345",
    "",
]


def export_file(file: TokenizerFile, case: str, output: Path) -> ExportReport:
    model = tiny(case, vocab_size=400)
    return export_model(random_parameters(model).__getitem__, model, output, dtype="fp32", tokenizer=file)


def export_with(tokenizer: Path, eod_id: int, case: str, output: Path) -> None:
    export_file(TokenizerFile(tokenizer.read_bytes(), str(tokenizer), eod_id), case, output)


@pytest.fixture
def ours(tmp_path: Path) -> Tokenizer:
    train_tokenizer(["It is a truth universally acknowledged"] * 3, 290).save(tmp_path / "tokenizer.json")
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_auto_tokenizer_encodes_as_ours(case: str, ours: Tokenizer, tmp_path: Path) -> None:
    export_with(tmp_path / "tokenizer.json", ours.eod_id, case, tmp_path / "model")

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")

    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_token, theirs.eos_token_id) == (END_OF_DOCUMENT, ours.eod_id)
    assert theirs.bos_token_id == ours.eod_id, "a text begins where another ends"
    assert theirs.model_max_length == 24
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id) == (ours.eod_id, ours.eod_id)


def test_begin_token_of_a_tokenizer_is_kept(tmp_path: Path) -> None:
    tokens = {"a": 0, "b": 1, "<|end_of_text|>": 2, "<|begin_of_text|>": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|end_of_text|>", "<|begin_of_text|>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 3)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    export_with(tmp_path / "tokenizer.json", 2, "llama", tmp_path / "model")

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")

    assert (theirs.bos_token, theirs.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")
    assert theirs("b a")["input_ids"] == [3, 1, 0]
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_without_a_tokenizer_no_token_is_claimed(tmp_path: Path) -> None:
    for case in ("llama", "gpt2"):
        model = tiny(case)
        report = export_model(random_parameters(model).__getitem__, model, tmp_path / case, dtype="fp32")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / case)
        assert theirs.generation_config.eos_token_id is None
        assert theirs.config.bos_token_id is None
        assert any("there is no tokenizer" in note for note in report.notes)


def test_a_tokenizer_of_another_model_is_refused(ours: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has no token 399, which should end documents"):
        export_with(path, 399, "llama", tmp_path / "model")

    content = json.loads(path.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 400, "content": "<extra>"})
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"has token ids up to 400, but model\.vocab_size=400"):
        export_with(path, ours.eod_id, "llama", tmp_path / "model")

    for damaged in ('{"model": {"vocab": ["a"]}}', '{"model": {"vocab": {"a": "x"}}}', '{"added_tokens": [{}]}'):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer\.json of the tokenizers library"):
            export_with(path, ours.eod_id, "llama", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_unigram_vocabularies_are_lists(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)], 0, False))
    backend.save(str(tmp_path / "tokenizer.json"))

    export_with(tmp_path / "tokenizer.json", 1, "llama", tmp_path / "model")

    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == "</s>"


KINDS: dict[str, dict[str, Any]] = {
    "bpe": {},
    "unigram": {"model_type": "unigram", "vocab_size": 60, "byte_fallback": False},
    "identity": {
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "user_defined_symbols": ["<sep>"],
    },
    "without-dummy-prefix": {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
}  # fmt: skip
ODD_TEXTS = [
    *TEXTS,
    "the cat sat on the mat, the hat",
    " lead\r\n\ttail  ",
    "na\u00efve caf\u00e9 \U0001f600 \u6f22\u5b57 e\u0301 \uff41\u0301",
    "\x00\x01\x7f\x80\x9f\xa0\xad\xff",
    "<|endoftext|> </s> <s> a</s>b <unk> <sep> <0x0A>",
    "".join(map(chr, range(0x180))),
]


def sentencepiece_file(path: Path, **options: Any) -> tuple[TokenizerFile, Tokenizer]:
    path.write_bytes(sentencepiece_model(**options))
    ours = load_tokenizer(path)
    return TokenizerFile(path.read_bytes(), str(path), ours.eod_id, ours.vocabulary()), ours


@pytest.mark.slow(kept=["llama-bpe", "llama-unigram", "llama-without-dummy-prefix", "gemma3-bpe", "gpt2-bpe"])
@pytest.mark.parametrize(
    ("case", "kind"),
    [*(("llama", kind) for kind in KINDS), *((case, "bpe") for case in ("qwen3", "gemma2", "gemma3", "neox", "gpt2"))],
)
def test_sentencepiece_ids_in_transformers_are_ours(case: str, kind: str, tmp_path: Path) -> None:
    file, ours = sentencepiece_file(tmp_path / "tokenizer.model", **KINDS[kind])

    report = export_file(file, case, tmp_path / "model")

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in ODD_TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text), text
    assert theirs.decode(ours.encode("the cat sat")) == "the cat sat"
    assert (theirs.eos_token, theirs.eos_token_id, theirs.bos_token) == ("</s>", ours.eod_id, "<s>")
    assert len(theirs) == ours.vocab_size
    assert (tmp_path / "model/tokenizer.model").read_bytes() == file.content
    assert any("with the sentencepiece library and tokenizer.model" in note for note in report.notes) == (
        kind != "unigram"
    )


@pytest.mark.parametrize("case", ["qwen2", "mistral", "olmo2", "phi3"])
def test_sentencepiece_with_a_fixed_class_is_refused(case: str, tmp_path: Path) -> None:
    file, _ = sentencepiece_file(tmp_path / "tokenizer.model")
    with pytest.raises(CheckpointError, match=rf'tokenizer\.model: .* model_type="{case}"; export with --no-tokenizer'):
        export_file(file, case, tmp_path / "model")
    assert not (tmp_path / "model").exists()
