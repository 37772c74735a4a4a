"""Models of Hugging Face: the keys of their configuration, loading, and the round trip of an export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.contracts.errors import CheckpointError, DataError
from megatrain.data.tokenizer import load_tokenizer, train_tokenizer
from megatrain.hf import TokenizerFile, export_model, open_model
from megatrain.hf.families import FAMILIES, IGNORED
from megatrain.inference.loaded_model import load
from tests.helpers.hf_models import (
    CASES,
    LOGITS_BOUND,
    assert_same_logits,
    export,
    file_contents,
    our_logits,
    random_parameters,
    some_tokens,
    their_logits,
    tiny,
)
from tests.helpers.huggingface import oracle, with_images
from tests.helpers.require import lazy_module, require_module

transformers = lazy_module("transformers")

WITHOUT_EFFECT = IGNORED.union(*(family.ignored for family in FAMILIES))
MODELS = (
    "llama", "llama-3.1", "llama-yarn", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "phi3", "neox",
    "gpt2",
)  # fmt: skip
NESTED = "text_config"
"""The key of the object that describes the language model, in files of models with images."""
ADDED: dict[str, Any] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 7, "logit_scale": 0.1,
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "use_qk_norm": True, "num_local_experts": 4,
    "partial_rotary_factor": 0.5, "use_parallel_residual": True, "clip_qkv": 1.0, "auto_map": {"AutoModel": "x.Y"},
}  # fmt: skip
"""Keys of other families, as in models that are nearly one of ours."""


def changed(value: Any) -> Iterator[Any]:
    """Yield other values for a key than this one."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, 2 * value, 1)
        case float():
            yield from (2 * value + 0.5, value / 2)
        case str():
            yield from (f"{value}x", "gelu", "dynamic", "linear", "full_attention")
        case list():
            yield from (value[:1], [*value[1:], "sliding_attention"], [])
        case dict():
            yield {}
            for key, inner in value.items():
                yield from ({**value, key: other} for other in changed(inner))
            yield {**value, "attention_factor": 2.0}
        case None:
            yield from (True, 3, 0.5, "x")


def changes_of(config: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield a key, another value, and the whole file with it."""
    for key, value in config.items():
        if key == NESTED:
            # Once for each key: the case of the same model without images has the other values.
            once: dict[str, tuple[Any, dict[str, Any]]] = {}
            for inner, other, whole in changes_of(value):
                once.setdefault(inner, (other, config | {key: whole}))
            yield from ((inner, other, whole) for inner, (other, whole) in once.items())
            others: list[Any] = [{}]
        else:
            others = [other for other in changed(value) if other != value]
        # Such a key is ignored by its name, for any value.
        yield from ((key, other, config | {key: other}) for other in (others[:1] if key in WITHOUT_EFFECT else others))
        if value is not None:
            yield key, None, config | {key: None}
    added = {key: value for key, value in ADDED.items() if config.get(key) is None}
    yield from ((key, value, config | {key: value}) for key, value in added.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", [*MODELS, "gemma3-images"])
def test_a_changed_key_is_refused_or_computed(case: str, tmp_path: Path) -> None:
    model = tiny(case.removesuffix("-images"))
    theirs = oracle(model, torch.float32)
    if case.endswith("-images"):
        theirs = with_images(theirs)
    theirs.save_pretrained(tmp_path)
    path, all_tokens = tmp_path / "config.json", some_tokens(model)
    config = {**theirs.config.to_dict(), **json.loads(path.read_text())}
    num_computed = num_refused = 0
    for key, value, whole in changes_of(config):
        path.write_text(json.dumps(whole))
        try:
            opened = open_model(tmp_path)
            tokens = all_tokens[: opened.model.seq_len]
            found = our_logits(dict(opened.parameters()), opened.model, tokens)
        except CheckpointError:
            num_refused += 1
            continue
        num_computed += 1
        try:
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
            for part in (again.config, again.config.get_text_config()):
                part.return_dict = True
            expected = their_logits(again, tokens)
        except Exception:  # noqa: BLE001  whatever it is, there is nothing to compare with
            # null counts as missing here, and a whole number is a number.
            is_loose = value is None or isinstance(value, int)
            assert is_loose or key in WITHOUT_EFFECT, f"transformers cannot compute {key}={value!r}, and we do"
            continue
        # Relative to the largest logit: some values make attention so sharp that it amplifies the rounding of both
        # sides.
        bound = LOGITS_BOUND * max(1.0, expected.abs().max().item())
        assert_same_logits(found, expected, bound, f"{key}={value!r} in {whole}")
    assert num_computed > 20
    assert num_refused > 20


@pytest.mark.slow(kept=["gpt2"])
@pytest.mark.parametrize("case", ["llama-tied", "gpt2"])
def test_logits_are_those_of_the_parameters(case: str, tmp_path: Path) -> None:
    model, tokens_SB = tiny(case, dropout=0.0), some_tokens(tiny(case))
    parameters = random_parameters(model)
    loaded = load(export(parameters, model, tmp_path / "exported"), device="cpu")

    assert torch.equal(loaded.logits(tokens_SB.t()), our_logits(parameters, model, tokens_SB))
    assert (loaded.step, loaded.config.vocab_size) == (0, model.vocab_size)
    with pytest.raises(DataError, match=r"has neither tokenizer\.json nor tokenizer\.model; copy its"):
        loaded.generate("a")
    with pytest.raises(CheckpointError, match="step=3: a Hugging Face directory has neither steps nor"):
        load(tmp_path / "exported", step=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model, tokens_SB = tiny(case), some_tokens(tiny(case))
    place = export(random_parameters(model), model, tmp_path / "exported")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place).eval()

    loaded = load(place, device="cpu")
    tokens_SB = tokens_SB[: loaded.config.seq_len]
    assert_same_logits(loaded.logits(tokens_SB.t()), their_logits(theirs, tokens_SB))


require_module("safetensors")
require_module("tokenizers")


WHOLE = [case for case in CASES if case != "llama-dynamic"]
"""All except llama-dynamic, whose files do not contain seq_len."""


QUICK = ("llama-3.1", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "phi3", "neox", "gpt2")


@pytest.mark.slow(kept=[f"{case}-bf16" for case in QUICK])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", WHOLE)
def test_the_second_export_is_bitwise_the_first(case: str, dtype: Any, tmp_path: Path) -> None:
    model = tiny(case, init_std=0.013, vocab_size=300, dropout=0.1 if case.startswith("gpt2") else 0.0)
    parameters = random_parameters(model)
    if dtype == "bf16":
        parameters = {name: parameter.to(torch.bfloat16).float() for name, parameter in parameters.items()}
    train_tokenizer(["to be or not to be"], 270).save(tmp_path / "tokenizer.json")

    def write(parameters: dict[str, torch.Tensor], model: Any, tokenizer: Path, name: str) -> dict[str, bytes]:
        export_model(
            parameters.__getitem__, model, tmp_path / name, dtype=dtype, max_shard_bytes=30_000,
            tokenizer=TokenizerFile(tokenizer.read_bytes(), str(tokenizer), load_tokenizer(tokenizer).eod_id),
        )  # fmt: skip
        return file_contents(tmp_path / name)

    first = write(parameters, model, tmp_path / "tokenizer.json", "first")
    opened = open_model(tmp_path / "first")
    assert opened.tokenizer is not None
    imported = dict(opened.parameters())
    second = write(imported, opened.model, opened.tokenizer, "second")

    assert "model.safetensors.index.json" in first
    assert first.keys() == second.keys()
    assert all(first[name] == second[name] for name in first)
    for name, one in imported.items():
        # all rows except those that pad the vocabulary, whose number differs between the two models
        num_rows = model.vocab_size if name in ("embedding.word.weight", "loss_head.weight") else None
        assert torch.equal(one[:num_rows], parameters[name][:num_rows]), name
        assert num_rows is None or not one[num_rows:].any()


@pytest.mark.parametrize(("case", "changes"), [("llama", {"dropout": 0.5}), ("gpt2", {"has_bias": False})])
def test_round_trip_without_keys_that_the_family_lacks(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(case, **changes)

    export(random_parameters(model), model, tmp_path / "first")
    opened = open_model(tmp_path / "first")
    export(dict(opened.parameters()), opened.model, tmp_path / "second")

    assert file_contents(tmp_path / "first") == file_contents(tmp_path / "second")
