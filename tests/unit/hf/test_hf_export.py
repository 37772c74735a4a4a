"""transformers loads exported directories; exports that are refused or fail leave no files."""

from __future__ import annotations

import json
import math
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.hf import export_model
from megatrain.hf.export import plan_shards
from megatrain.hf.llama import Llama
from megatrain.hf.tensor_map import HfTensor
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes
from tests.helpers.hf_models import (
    CASES,
    LLAMA,
    assert_same_logits,
    export,
    file_contents,
    our_logits,
    random_parameters,
    some_tokens,
    their_logits,
    tiny,
)
from tests.helpers.require import lazy_module, require_module

safetensors = require_module("safetensors")
transformers = lazy_module("transformers")


def load(directory: Path) -> Any:
    """Return transformers' model of a directory; fail if transformers reports a problem."""
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return theirs.eval()


@pytest.mark.slow(kept=["gpt2", "llama-linear", "llama-wide-heads"])
@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_our_logits(case: str, tmp_path: Path) -> None:
    model = tiny(case)
    parameters = random_parameters(model)
    tokens = some_tokens(model)

    theirs = load(export(parameters, model, tmp_path / "model"))
    expected = their_logits(theirs, tokens)

    assert theirs.dtype == torch.float32
    assert expected.std() > 0.5, "weights so small would hide a wrong layer"
    assert_same_logits(our_logits(parameters, model, tokens), expected)


@pytest.mark.parametrize("has_qkv_bias", [False, True])
def test_biases_that_we_lack_are_zero(tmp_path: Path, has_qkv_bias: bool) -> None:
    model = tiny("gpt2", has_bias=False, has_qkv_bias=has_qkv_bias)
    parameters = random_parameters(model)
    tokens = some_tokens(model)

    report = export_model(parameters.__getitem__, model, tmp_path / "model", dtype="fp32")
    expected = their_logits(load(tmp_path / "model"), tokens)

    assert_same_logits(our_logits(parameters, model, tokens), expected)
    assert any("biases of GPT2LMHeadModel are written as zeros" in note for note in report.notes)


@pytest.mark.slow(kept=["fp16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_the_weights_rounded_once(dtype: Any, tmp_path: Path) -> None:
    model = tiny("llama-biases")
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    parameters = random_parameters(model)
    rounded = {name: parameter.to(torch_dtype).float() for name, parameter in parameters.items()}

    found = load(export(parameters, model, tmp_path / "half", dtype)).state_dict()
    expected = load(export(rounded, model, tmp_path / "full")).state_dict()

    assert {one.dtype for one in found.values()} == {torch_dtype}
    assert all(torch.equal(found[name].float(), one) for name, one in expected.items())


def test_fp16_refuses_values_beyond_its_range(tmp_path: Path) -> None:
    model = tiny("llama")
    parameters = random_parameters(model)
    parameters["blocks.1.mlp_branch.mlp.up.weight"][1, 3, 5] = 70000.0

    with pytest.raises(
        CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: holds values up to 70000.*fp16"
    ):
        export(parameters, model, tmp_path / "model", "fp16")

    assert list(tmp_path.iterdir()) == []


def test_shards_are_filled_and_indexed(tmp_path: Path) -> None:
    model = tiny("llama-biases")
    parameters = random_parameters(model)
    max_shard_bytes = 20_000
    reads: list[str] = []

    def read(name: str) -> Tensor:
        reads.append(name)
        return parameters[name]

    report = export_model(read, model, tmp_path / "model", dtype="fp32", max_shard_bytes=max_shard_bytes)

    sizes = [size for name, size in report.files if name.endswith(".safetensors")]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    assert len(names) == 5
    assert max(sizes) < max_shard_bytes + 2_000, "a file is the tensors and a header"
    assert sorted(reads) == sorted(parameters), "each parameter is read once"
    assert sorted(set(index["weight_map"].values())) == names
    state = load(tmp_path / "model").state_dict()
    assert index["metadata"]["total_size"] == sum(one.numel() * 4 for one in state.values())
    assert report.num_parameters == sum(one.numel() for one in state.values())
    assert report.num_tensors == len(index["weight_map"])
    whole = load(export(parameters, model, tmp_path / "whole")).state_dict()
    assert all(torch.equal(state[name], one) for name, one in whole.items())


class UnsortedLlama(Llama):
    """A family in which the tensors of one parameter are not adjacent."""

    def tensors(self, model: ModelConfig) -> Iterator[HfTensor]:
        yield from sorted(super().tensors(model), key=lambda tensor: tensor.name.split(".")[-2:])


def test_tensors_of_one_parameter_may_be_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    parameters = random_parameters(model)
    whole = load(export(parameters, model, tmp_path / "whole")).state_dict()

    monkeypatch.setattr("megatrain.hf.export.family_for_export", lambda model: UnsortedLlama())
    found = load(export(parameters, model, tmp_path / "apart")).state_dict()

    assert all(torch.equal(found[name], one) for name, one in whole.items())


def test_a_shard_takes_what_fits_exactly() -> None:
    tensors = [HfTensor(str(number), (size,), "", ()) for number, size in enumerate((4, 6, 11, 1, 9, 1))]

    shards = plan_shards(tensors, item_bytes=2, max_shard_bytes=20)

    assert [[math.prod(one.shape) for one in shard] for shard in shards] == [[4, 6], [11], [1, 9], [1]]


def test_memory_is_one_shard_and_two_parameters(tmp_path: Path) -> None:
    model = tiny("llama", num_layers=8)
    max_shard_bytes = 40_000
    largest = 96 * 32 * 4

    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def read(name: str) -> Tensor:
        alive = sum(storage() is not None for storage in storages)
        assert alive <= 1, f"{name} is read while {alive} other parameters are in memory"
        parameter = parameters[name].clone()
        storages.append(weakref.ref(parameter.untyped_storage()))
        return parameter

    parameters = random_parameters(model)
    with PeakTensorBytes() as memory:
        export_model(read, model, tmp_path / "model", dtype="fp32", max_shard_bytes=max_shard_bytes)

    assert sum(parameter.numel() for parameter in parameters.values()) * 4 > 5 * (max_shard_bytes + largest)
    assert memory.peak_bytes <= max_shard_bytes + 2 * largest + 8192


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "parallel": (LLAMA | {"block": "parallel"}, ['model.block="parallel" .* LlamaForCausalLM']),
    "window": (LLAMA | {"window_size": 8, "has_bias": True}, ["model.window_size=8 "]),
    "layernorm": (LLAMA | {"norm": "layernorm", "mlp": "gelu"}, ['model.norm="layernorm"', 'model.mlp="gelu"']),
    "rmsnorm": (CASES["gpt2"] | {"norm": "rmsnorm"}, ['model.norm="rmsnorm" .* GPT2LMHeadModel']),
    "heads": (
        LLAMA | {"num_heads": 5, "num_kv_heads": 5, "head_dim": 4, "has_bias": True},
        ["model.hidden_size=32 .* model.num_heads=5"],
    ),
    "gpt2-gqa": (CASES["gpt2"] | {"num_kv_heads": 2}, ["model.num_kv_heads=2 "]),
    "gpt2-wide": (CASES["gpt2"] | {"head_dim": 12}, ["model.head_dim=12 "]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_no_family_expresses_is_refused(case: str, tmp_path: Path) -> None:
    values, messages = REFUSED[case]
    model = ModelConfig(**values)

    with pytest.raises(ConfigError) as raised:
        export(random_parameters(model), model, tmp_path / "model")

    assert len(raised.value.problems) == len(messages)
    for message, problem in zip(messages, raised.value.problems, strict=True):
        assert re.search(message, problem)
        assert "what can be exported" in problem
    assert list(tmp_path.iterdir()) == []


def test_a_window_of_the_whole_sequence_is_full_attention(tmp_path: Path) -> None:
    model = tiny("llama", window_size=24)
    assert export(random_parameters(model), model, tmp_path / "model").is_dir()


def test_dropout_is_reported(tmp_path: Path) -> None:
    model = tiny("gpt2", dropout=0.25)
    export(random_parameters(model), model, tmp_path / "gpt2")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "gpt2")
    assert (config.embd_pdrop, config.resid_pdrop, config.attn_pdrop) == (0.25, 0.25, 0.0)

    model = tiny("llama", dropout=0.25)
    report = export_model(random_parameters(model).__getitem__, model, tmp_path / "llama", dtype="fp32")
    assert any("model.dropout=0.25 is not in config.json" in note for note in report.notes)


def test_a_parameter_of_another_shape_is_named(tmp_path: Path) -> None:
    model = tiny("llama")
    parameters = random_parameters(model) | {"loss_head.norm.weight": torch.ones(31)}

    with pytest.raises(CheckpointError, match=r"loss_head\.norm\.weight has shape \(31,\).*requires \(32,\)"):
        export(parameters, model, tmp_path / "model")

    assert list(tmp_path.iterdir()) == []


def test_an_existing_export_is_replaced_only_by_force(tmp_path: Path) -> None:
    model, other = tiny("llama"), tiny("gpt2")
    place = tmp_path / "model"
    export(random_parameters(model), model, place)
    before = file_contents(place)

    with pytest.raises(CheckpointError, match=r"model: already holds a model; .*--force"):
        export(random_parameters(other), other, place)
    assert file_contents(place) == before

    parameters = random_parameters(other)
    export_model(parameters.__getitem__, other, place, dtype="fp32", max_shard_bytes=9000, is_forced=True)
    assert (
        file_contents(export(parameters, other, tmp_path / "once"))["config.json"]
        == (place / "config.json").read_bytes()
    )
    assert not (place / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "once"]


def test_a_failed_replacement_leaves_the_old_model(tmp_path: Path) -> None:
    model = tiny("llama")
    parameters = random_parameters(model)
    place = export(parameters, model, tmp_path / "model")
    before = file_contents(place)
    del parameters["loss_head.weight"]

    with pytest.raises(KeyError):
        export_model(parameters.__getitem__, model, place, dtype="fp32", is_forced=True)

    assert file_contents(place) == before
    assert list(tmp_path.iterdir()) == [place]


def test_foreign_files_are_never_replaced(tmp_path: Path) -> None:
    model = tiny("llama")
    parameters = random_parameters(model)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("text")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "thesis")

    for name, message in (
        ("thesis", r"thesis: holds chapter\.tex"),
        ("file", "not a directory"),
        ("link", "not a directory"),
    ):
        with pytest.raises(CheckpointError, match=message):
            export_model(parameters.__getitem__, model, tmp_path / name, dtype="fp32", is_forced=True)
    with pytest.raises(CheckpointError, match=r"below: cannot be created: .*; choose another directory"):
        export(parameters, model, tmp_path / "file" / "below")

    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "text"


def test_weight_file_has_the_framework_and_the_usual_mode(tmp_path: Path) -> None:
    """Older transformers need the name of the framework; the library would let only the owner read the file."""
    model = tiny("llama")
    place = export(random_parameters(model), model, tmp_path / "model")

    with safetensors.safe_open(place / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert (place / "model.safetensors").stat().st_mode == (place / "config.json").stat().st_mode


def test_an_empty_directory_and_missing_parents_will_do(tmp_path: Path) -> None:
    model = tiny("llama")
    parameters = random_parameters(model)
    (tmp_path / "empty").mkdir()

    for directory in (tmp_path / "empty", tmp_path / "new" / "deep"):
        assert export(parameters, model, directory) == directory
        assert torch.equal(load(directory).model.norm.weight, parameters["loss_head.norm.weight"])


def test_a_shard_size_must_be_positive(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(CheckpointError, match="max_shard_bytes=0 must be positive"):
        export_model(random_parameters(model).__getitem__, model, tmp_path / "m", dtype="fp32", max_shard_bytes=0)
