"""Imports of directories that transformers saved; and directories that are refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.contracts.errors import CheckpointError
from megatrain.hf import HfModel, open_model
from tests.helpers.hf_models import (
    CASES,
    assert_same_logits,
    export,
    file_contents,
    our_logits,
    random_parameters,
    some_tokens,
    their_logits,
    tiny,
)
from tests.helpers.huggingface import oracle, our_weights, with_images
from tests.helpers.require import lazy_module, require_module

safetensors_torch = require_module("safetensors.torch")
transformers = lazy_module("transformers")

Change = Callable[[dict[str, Tensor]], object]


def parameters_of(opened: HfModel) -> dict[str, Tensor]:
    return dict(opened.parameters())


def change_tensors(directory: Path, change: Change) -> None:
    path = directory / "model.safetensors"
    tensors = safetensors_torch.load(path.read_bytes())
    change(tensors)
    safetensors_torch.save_file(tensors, path, metadata={"format": "pt"})


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return export(random_parameters(tiny("llama")), tiny("llama"), tmp_path / "llama")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return export(random_parameters(tiny("gpt2")), tiny("gpt2"), tmp_path / "gpt2")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    oracle(tiny("llama"), torch.float32).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


@pytest.mark.slow(kept=["llama", "gpt2", "gemma3", "phi3"])
@pytest.mark.parametrize("case", CASES)
def test_we_compute_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    model = tiny(case)
    theirs = oracle(model, torch.float32)
    theirs.save_pretrained(tmp_path)
    tokens = some_tokens(model)

    opened = open_model(tmp_path)
    parameters = parameters_of(opened)

    found = our_logits(parameters, ModelConfig(**opened.config), tokens)
    logits = their_logits(theirs, tokens)
    assert (found - logits).abs().max() < 1e-5 * logits.abs().max()
    expected = our_weights(theirs.state_dict(), opened.model)
    assert expected.keys() - {"loss_head.weight"} == parameters.keys() - {"loss_head.weight"}
    assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters.items())
    assert opened.architecture == type(theirs).__name__
    assert opened.num_parameters == sum(parameter.numel() for parameter in parameters.values())
    assert opened.notes == ()


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_is_ours_again(case: str, tmp_path: Path) -> None:
    model = tiny(case, init_std=0.015)
    found = open_model(export(random_parameters(model), model, tmp_path / case)).model
    # the explicit value that 0 stands for; and the length before stretching instead of ours
    expected = replace(
        model,
        num_kv_heads=model.resolved_num_kv_heads,
        head_dim=model.resolved_head_dim,
        ffn_size=model.resolved_ffn_size,
        seq_len=model.rope_original_seq_len if model.rope_scaling == "dynamic" else model.seq_len,
        vocab_multiple=found.vocab_multiple,
    )
    if model.window_size == model.seq_len and not model.rope_local_theta:
        expected = replace(expected, window_size=0)
    if case.startswith(("gpt2", "neox")):
        expected = replace(expected, head_dim=found.head_dim, num_kv_heads=found.num_kv_heads)
    assert found == expected


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_gemma3_with_images_gives_its_language_model(prefix: str, tmp_path: Path) -> None:
    model = tiny("gemma3")
    theirs = with_images(oracle(model, torch.float32))
    theirs.save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda all_tensors: _rename(all_tensors, prefix))

    opened = open_model(tmp_path)
    assert opened.notes == (
        "the parts that read images (vision_tower, multi_modal_projector) are left out: the model reads text only",
    )
    assert replace(opened.model, vocab_multiple=model.vocab_multiple) == model
    tokens = some_tokens(model)
    found = our_logits(parameters_of(opened), opened.model, tokens)
    assert_same_logits(found, their_logits(theirs, tokens))

    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change_config(tmp_path, text_config=text | {"final_logit_softcapping": 30.0})
    with pytest.raises(CheckpointError, match=r"text_config: final_logit_softcapping=30\.0; only null"):
        open_model(tmp_path)
    change_config(tmp_path, text_config=text, tie_word_embeddings=None)
    with pytest.raises(CheckpointError, match="tie_word_embeddings=null; transformers reads null as false"):
        open_model(tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="tie_word_embeddings=false; only true"):
        open_model(tmp_path)


def _rename(tensors: dict[str, Tensor], prefix: str) -> None:
    for name in [name for name in tensors if "language_model" in name]:
        tensors[prefix + name.split("language_model.")[1].removeprefix("model.")] = tensors.pop(name)


def test_shards_of_transformers_are_read(sharded: Path) -> None:
    model = tiny("llama")
    assert len(list(sharded.glob("*.safetensors"))) > 3

    expected = our_weights(oracle(model, torch.float32).state_dict(), open_model(sharded).model)
    found = parameters_of(open_model(sharded))

    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.slow(kept=["dtype0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny("gpt2")
    theirs = oracle(model, torch.float32).to(dtype)
    theirs.save_pretrained(tmp_path)

    opened = open_model(tmp_path)
    found = parameters_of(opened)

    state = {name: one.float() for name, one in theirs.state_dict().items()}
    assert {one.dtype for one in found.values()} == {torch.float32}
    assert all(torch.equal(one, our_weights(state, opened.model)[name]) for name, one in found.items())


@pytest.mark.parametrize("case", ["gpt2", "llama-tied"])
def test_a_model_saved_without_its_head_has_shorter_names(case: str, tmp_path: Path) -> None:
    theirs = oracle(tiny(case), torch.float32)
    theirs.save_pretrained(tmp_path / "whole")
    theirs.base_model.save_pretrained(tmp_path / "base")
    tensors = safetensors_torch.load((tmp_path / "base" / "model.safetensors").read_bytes())
    assert not any(name.startswith(("transformer.", "model.")) for name in tensors)

    found, expected = parameters_of(open_model(tmp_path / "base")), parameters_of(open_model(tmp_path / "whole"))

    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_constants_of_old_files_are_passed_over(gpt2: Path, llama: Path) -> None:
    def add_to_gpt2(tensors: dict[str, Tensor]) -> None:
        tensors["transformer.h.1.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.uint8)
        tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()

    def add_to_llama(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    for directory, add in ((gpt2, add_to_gpt2), (llama, add_to_llama)):
        expected = parameters_of(open_model(directory))
        change_tensors(directory, add)
        found = parameters_of(open_model(directory))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_a_tied_head_that_differs_is_refused(gpt2: Path) -> None:
    change_tensors(gpt2, lambda tensors: tensors.update({"lm_head.weight": torch.ones(83, 32)}))

    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from .*wte\.weight.*tie_word_embeddings=true"):
        parameters_of(open_model(gpt2))


def test_missing_keys_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    llama_sizes = {
        "vocab_size": 83, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 24,
    }  # fmt: skip
    gpt2_sizes = {"vocab_size": 83, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 24}
    for model_type, sizes in (("llama", llama_sizes), ("gpt2", gpt2_sizes)):
        config = transformers.AutoConfig.for_model(model_type, **sizes)
        directory = tmp_path / model_type
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        complete = open_model(directory).config | {"head_dim": 0}
        (directory / "config.json").write_text(json.dumps({"model_type": model_type} | sizes))
        assert open_model(directory).config == complete


def test_both_spellings_of_scaled_rotary_positions_are_read(llama: Path) -> None:
    shared = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 8.0}
    for values in (
        {"rope_theta": 700.0, "rope_scaling": shared | {"type": "llama3", "original_max_position_embeddings": 16}},
        {
            "rope_theta": None, "rope_scaling": None,
            "rope_parameters":
                shared | {"rope_type": "llama3", "original_max_position_embeddings": 16, "rope_theta": 700.0},
        },
    ):  # fmt: skip
        change_config(llama, **values)
        model = open_model(llama).model
        assert (model.rope_scaling, model.rope_theta, model.rope_scaling_factor) == ("llama3", 700.0, 4.0)
        assert (model.rope_low_freq_factor, model.rope_high_freq_factor) == (1.0, 8.0)
        assert model.rope_original_seq_len == 16


def test_dropout_that_we_lack_is_reported(gpt2: Path, llama: Path) -> None:
    change_config(gpt2, resid_pdrop=0.2, embd_pdrop=0.3, attn_pdrop=0.1)
    opened = open_model(gpt2)
    assert opened.model.dropout == 0.2
    assert [note.split(" ")[0] for note in opened.notes] == ["embd_pdrop=0.3", "attn_pdrop=0.1"]

    change_config(llama, attention_dropout=0.1)
    assert [note.split(" ")[0] for note in open_model(llama).notes] == ["attention_dropout=0.1"]


def test_a_scaling_of_positions_by_one_is_none(llama: Path) -> None:
    frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
    for kind, more in (("default", {}), ("linear", {}), ("llama3", frequencies)):
        change_config(llama, rope_scaling={"rope_type": kind, "factor": 1.0, **more})
        assert open_model(llama).model.rope_scaling == "none", kind


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"model_type": "gemma"},
        r'model_type="gemma"; only "llama" or "qwen2" or "qwen3" or "mistral" or "gemma2" or "gemma3_text" or',
    ),
    ("llama", {"use_qk_norm": True}, "use_qk_norm=true; this key is unknown here and may change"),
    ("llama", {"is_decoder": True}, "is_decoder=true; only false"),
    ("llama", {"model_type": None}, "model_type=null"),
    ("llama", {"hidden_act": "gelu"}, r'hidden_act="gelu"; only "silu"'),
    ("llama", {"mlp_bias": True}, "mlp_bias=true; must equal attention_bias=false"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        r'rope_scaling: rope_type="longrope"; only',
    ),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
        "rope_scaling: mscale=1.0; this",
    ),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
        "truncate=false; only true",
    ),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling_factor=0.5 is out of range"),
    ("llama", {"rope_scaling": "linear"}, r'rope_scaling="linear"; expected an object'),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; only 1.0"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config=.*original model"),
    ("llama", {"num_key_value_heads": 3}, "describes no model .*model.num_kv_heads=3 must divide"),
    ("llama", {"hidden_size": 0}, "hidden_size=0; expected a positive integer"),
    ("llama", {"hidden_size": True}, "hidden_size=true; expected a positive integer"),
    ("llama", {"hidden_size": None}, "hidden_size=null; expected a positive integer"),
    ("llama", {"rms_norm_eps": "1e-5"}, r'rms_norm_eps="1e-5"; expected a number'),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1; expected true or false"),
    ("llama", {"num_attention_heads": 6, "head_dim": None}, "describes no model .*model.num_heads=6 must divide"),
    ("llama", {"num_hidden_layers": 10**6}, "1,000,000 layers, but the files have only 21 tensors"),
    ("gpt2", {"activation_function": "gelu"}, r'activation_function="gelu"; only "gelu_new" or'),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=false; only true"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true; only false"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=true; only false"),
    ("gpt2", {"resid_pdrop": 1.0}, "model.dropout=1.0 is out of range"),
]
"""Family, changed keys of its config.json, and the message."""


def problem_of(directory: Path) -> str:
    """Return why a directory is refused, or "" if it is not."""
    try:
        open_model(directory)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_configuration_that_we_do_not_compute_is_refused(llama: Path, gpt2: Path) -> None:
    directories = {"llama": llama, "gpt2": gpt2}
    originals = {family: (directory / "config.json").read_text() for family, directory in directories.items()}
    for family, values, message in REFUSED:
        (directories[family] / "config.json").write_text(originals[family])
        change_config(directories[family], **values)
        assert re.search(rf"{family}/config\.json: (.*)?{message}", problem_of(directories[family])), values


def test_a_damaged_configuration_is_refused(llama: Path) -> None:
    path = llama / "config.json"
    for text, message in (("{", "not JSON"), ("[]", "a list, expected"), ("\udcff", "not JSON")):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
            open_model(llama)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        open_model(llama)


WRONG_TENSORS: list[tuple[Change, str]] = [
    (lambda tensors: tensors.pop("model.norm.weight"), r"model\.norm\.weight \[32\] is missing"),
    (
        lambda tensors: tensors.update({"model.norm.bias": torch.ones(32)}),
        r"model\.safetensors: model\.norm\.bias belongs to no part",
    ),
    (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
        r"model\.safetensors: model\.norm\.weight has shape \[31\], expected \[32\]",
    ),
    (
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
        r"model\.safetensors: model\.norm\.weight is of type I8",
    ),
    (
        lambda tensors: tensors.update({"norm.weight": torch.ones(32)}),
        r"model\.safetensors: holds model\.norm\.weight under two names",
    ),
    (lambda tensors: [tensors.pop(name) for name in list(tensors)[:8]], "and 3 more"),
]


def test_tensors_that_do_not_fit_are_named(llama: Path) -> None:
    original = (llama / "model.safetensors").read_bytes()
    for change, message in WRONG_TENSORS:
        (llama / "model.safetensors").write_bytes(original)
        change_tensors(llama, change)
        assert re.search(message, problem_of(llama)), message


def test_a_file_cut_short_is_named(sharded: Path) -> None:
    path = sorted(sharded.glob("model-00002-*"))[0]
    content = path.read_bytes()
    for length in (len(content) - 1, 40, 3, 0):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=rf"{path.name}: not a complete safetensors file"):
            open_model(sharded)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name}: no such file, although the model needs it"):
        open_model(sharded)


def test_index_that_contradicts_its_files_is_refused(sharded: Path, tmp_path: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    truth = json.loads(path.read_text())
    first, last = sorted(set(truth["weight_map"].values()))[:: len(set(truth["weight_map"].values())) - 1]
    shutil.copyfile(sharded / first, tmp_path / "outside.safetensors")

    def expect(weight_map: dict[str, Any], message: str) -> None:
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            open_model(sharded)

    moved = dict.fromkeys(truth["weight_map"], last)
    expect(truth["weight_map"] | {"model.norm.weight": first}, rf"{first}: holds no tensor model\.norm\.weight")
    expect(truth["weight_map"] | {"model.extra": first}, rf"{first}: holds no tensor model\.extra")
    dropped = {name: file for name, file in truth["weight_map"].items() if name != "model.embed_tokens.weight"}
    expect(dropped, r"holds the tensor model\.embed_tokens\.weight, but .*index\.json does not list it there")
    expect(moved, rf"{last}: holds no tensor")
    expect({"model.norm.weight": "../outside.safetensors"}, "expected the name of a .safetensors file beside it")
    expect({"model.norm.weight": 3}, "model.norm.weight=3; expected a string")
    expect({}, "names no tensor")


def test_pickles_are_refused_unread(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    before = file_contents(llama)

    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: a pickle file, which is never read"):
        open_model(llama)

    assert file_contents(llama) == before


def test_a_directory_without_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_model(llama)


@pytest.mark.parametrize("content", [b"IQ== 0\nIg== 1\n", b""])
def test_a_tokenizer_model_of_another_kind_is_left_out(content: bytes, tmp_path: Path) -> None:
    oracle(tiny("llama"), torch.float32).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(content)
    opened = open_model(tmp_path)
    assert opened.tokenizer is None
    assert "tokenizer.model: is not a SentencePiece model, and is left out" in opened.notes[-1]
