"""`megatrain ckpt export-hf` and `import-hf`: logits, bytes, and the start of a job."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import TOKENIZER_NAME
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.cli import main
from megatrain.commands.ckpt.export_hf import size_in_bytes
from megatrain.config.batch import BatchConfig
from megatrain.config.config import Config
from megatrain.config.model import ModelConfig
from megatrain.config.optimizer import OptimizerConfig
from megatrain.config.train import TrainConfig
from megatrain.conversion.hugging_face import import_hf
from megatrain.data.end_of_document import END_OF_DOCUMENT
from megatrain.data.tokenizer import load_tokenizer, train_tokenizer
from tests.helpers.hf_models import (
    export,
    file_contents,
    our_logits,
    random_parameters,
    some_tokens,
    their_logits,
    tiny,
)
from tests.helpers.require import lazy_module
from tests.helpers.saved_checkpoint import Ckpt, with_layout, write_as_job
from tests.helpers.sentencepiece_model import sentencepiece_model

transformers = lazy_module("transformers")
"""Importing it takes seconds: all tests that do are slow."""


def job_of(model: ModelConfig) -> Config:
    return Config(
        model=model,
        batch=BatchConfig(global_batch_size=4),
        train=TrainConfig(steps=5, precision="fp32"),
        optimizer=OptimizerConfig(lr=1e-3),
    )


def trained_state(parameters: dict[str, Tensor], average: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the state to save for some parameters, which are the moments as well, and for their average."""
    kinds = dict.fromkeys(("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"), parameters)
    kinds["optimizer.ema"] = average or {}
    return {f"{kind}.{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def export_with_tokenizer(case: str, directory: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Write a Hugging Face directory of a random model with a tokenizer; return the model and its parameters."""
    model = tiny(case, vocab_size=300)
    parameters = random_parameters(model)
    export(parameters, model, directory)
    train_tokenizer(["to be or not to be"], 270).save(directory / TOKENIZER_NAME)
    return model, parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tp"), [("llama", 2), ("gpt2", 2), ("llama", 4)], ids=["llama", "gpt2", "llama-key-value-heads-held-twice"]
)
def test_logits_of_a_trained_checkpoint_are_ours(ckpt: Ckpt, tmp_path: Path, case: str, tp: int) -> None:
    model = tiny(case)
    parameters = random_parameters(model)
    write_as_job(tmp_path / "saved", with_layout(job_of(model), tp=tp, pp=2), trained_state(parameters))

    found = ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "hf", "--json")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = some_tokens(model)
    assert torch.allclose(their_logits(theirs, tokens), our_logits(parameters, model, tokens), atol=1e-4)
    assert found["dtype"] == "fp32"
    assert any("there is no tokenizer" in note for note in found["notes"])


@pytest.mark.slow
def test_the_average_of_the_weights_is_exported_in_their_place(ckpt: Ckpt, tmp_path: Path) -> None:
    model = tiny("llama")
    job = dataclasses.replace(job_of(model), optimizer=OptimizerConfig(lr=1e-3, name="muon", ema_decay=0.9))
    weights = random_parameters(model)
    average = {name: weight + 1 for name, weight in weights.items()}
    write_as_job(tmp_path / "saved", with_layout(job, tp=2), trained_state(weights, average))
    assert ckpt("inspect", tmp_path / "saved", "--json")["has_ema"]

    for flags, expected in (((), weights), (("--ema",), average)):
        output = tmp_path / f"hf{len(flags)}"
        ckpt("export-hf", tmp_path / "saved", *flags, "--output", output)
        ckpt("import-hf", output, "--output", tmp_path / f"again{len(flags)}")
        again = LocalLocation(tmp_path / f"again{len(flags)}")
        reader = ParameterReader(again, read_manifest(again))
        for name, one in expected.items():
            rows = model.vocab_size if name in ("embedding.word.weight", "loss_head.weight") else None
            assert torch.equal(reader.read_parameter(name)[:rows], one[:rows])
    assert not ckpt("inspect", tmp_path / "again0", "--json")["has_ema"]
    error = ckpt("export-hf", tmp_path / "again0", "--ema", "--output", tmp_path / "none", code=66)
    assert "holds no average of the weights" in error


@pytest.mark.slow
def test_sample_takes_the_average_of_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("llama", vocab_size=300)
    job = dataclasses.replace(job_of(model), optimizer=OptimizerConfig(lr=1e-3, name="muon", ema_decay=0.9))
    weights = random_parameters(model)
    average = {name: weight.flip(0) for name, weight in weights.items()}
    train_tokenizer(["to be or not to be"], 270).save(tmp_path / TOKENIZER_NAME)
    tokenizer = (tmp_path / TOKENIZER_NAME).read_bytes()
    state, beside = trained_state(weights, average), {TOKENIZER_NAME: tokenizer}
    write_as_job(tmp_path / "saved", with_layout(job, tp=2), state, beside=beside)
    prompt = torch.tensor(load_tokenizer(tmp_path / TOKENIZER_NAME).encode("to be"))

    likeliest = []
    for parameters, flags in ((weights, []), (average, ["--ema"])):
        likeliest.append(our_logits(parameters, model, prompt[:, None])[0, -1].argmax().item())
        sampling = ["--prompt", "to be", "--max-tokens", "1", "--temperature", "0", "--device", "cpu", "--json"]
        assert main(["sample", str(tmp_path / "saved"), *flags, *sampling]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == likeliest[-1:]
    assert likeliest[0] != likeliest[1]


def their_model(case: str) -> Any:
    torch.manual_seed(2)
    if case == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=24, bos_token_id=None, eos_token_id=None
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_import_then_export_is_bitwise_the_same(ckpt: Ckpt, tmp_path: Path, case: str) -> None:
    their_model(case).save_pretrained(tmp_path / "theirs")

    ckpt("import-hf", tmp_path / "theirs", "--output", tmp_path / "first")
    ckpt("export-hf", tmp_path / "first", "--output", tmp_path / "ours", "--max-shard-size", "20KB")
    ckpt("import-hf", tmp_path / "ours", "--output", tmp_path / "second")
    ckpt("export-hf", tmp_path / "second", "--output", tmp_path / "again", "--max-shard-size", "20KB")

    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    assert file_contents(tmp_path / "ours") == file_contents(tmp_path / "again")
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("theirs", "ours")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    differences = ckpt("diff", tmp_path / "first", tmp_path / "second", "--tensors", "--json")
    assert (differences["tensors"], differences["values"]) == ([], [])


@pytest.mark.slow(kept=["llama-tied"])
@pytest.mark.parametrize("case", ["llama-tied", "gpt2"])
def test_an_import_is_a_checkpoint_that_verifies(ckpt: Ckpt, tmp_path: Path, case: str) -> None:
    model, parameters = export_with_tokenizer(case, tmp_path / "hf")

    found = ckpt("import-hf", tmp_path / "hf", "--output", tmp_path / "saved", "--json")

    assert "OK" in ckpt("verify", tmp_path / "saved")
    manifest = read_manifest(LocalLocation(tmp_path / "saved"))
    assert (manifest.step, manifest.has_optimizer, manifest.data.sources) == (0, False, ())
    reader = ParameterReader(LocalLocation(tmp_path / "saved"), manifest)
    for name, parameter in parameters.items():
        rows = model.vocab_size if name in ("embedding.word.weight", "loss_head.weight") else None
        assert torch.equal(reader.read_parameter(name)[:rows], parameter[:rows])
    assert (tmp_path / "saved/model.toml").read_text() == found["toml"]
    assert (tmp_path / "saved/tokenizer.json").read_bytes() == (tmp_path / "hf/tokenizer.json").read_bytes()
    tables = tomllib.loads(found["toml"])
    assert tables["checkpoint"]["load"] == str(tmp_path / "saved")
    assert dataclasses.replace(model, **tables["model"]) == ModelConfig(**tables["model"])
    assert (tables["model"]["hidden_size"], tables["model"]["vocab_size"]) == (32, 300)
    ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "again")
    before, after = (file_contents(tmp_path / name) for name in ("hf", "again"))
    assert after["model.safetensors"] == before["model.safetensors"]


def test_printed_configuration_is_valid_in_any_directory(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_with_tokenizer("gpt2", tmp_path / "hf")
    monkeypatch.chdir(tmp_path)

    text = ckpt("import-hf", "hf", "--output", "saved")

    tables = tomllib.loads(text)
    assert tables["checkpoint"]["load"] == str(tmp_path / "saved")
    assert tables["data"]["tokenizer"] == str(tmp_path / "hf/tokenizer.json")
    rest = "[batch]\nglobal_batch_size = 4\n[train]\nsteps = 3\n[optimizer]\nlr = 1e-3\n"
    (tmp_path / "job.toml").write_text(text + rest)
    assert main(["config", "check", str(tmp_path / "job.toml")]) == 0


def test_the_tokenizer_is_exported_unless_it_is_left_out(ckpt: Ckpt, tmp_path: Path) -> None:
    export_with_tokenizer("gpt2", tmp_path / "hf")
    ckpt("import-hf", tmp_path / "hf", "--output", tmp_path / "saved")

    ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "with", "--dtype", "bf16")
    ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "without", "--no-tokenizer")

    assert file_contents(tmp_path / "with")["tokenizer.json"] == file_contents(tmp_path / "hf")["tokenizer.json"]
    assert "tokenizer.json" not in file_contents(tmp_path / "without")
    message = ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "with", code=66)
    assert "replace it with --force" in message
    ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "with", "--force")


@pytest.mark.slow
@pytest.mark.parametrize("is_configured", [True, False])
def test_tokenizer_with_another_end_of_documents_comes_back(ckpt: Ckpt, tmp_path: Path, is_configured: bool) -> None:
    export_with_tokenizer("gpt2", tmp_path / "hf")
    tokenizer = tmp_path / "hf" / TOKENIZER_NAME
    tokenizer.write_text(tokenizer.read_text().replace(END_OF_DOCUMENT, "<|stop|>"))
    if is_configured:
        tokenizer.with_name("tokenizer_config.json").write_text('{"eos_token": "<|stop|>", "chat_template": "x"}')
    for name in () if is_configured else ("tokenizer_config.json", "generation_config.json"):
        tokenizer.with_name(name).unlink(missing_ok=True)

    notes = ckpt("import-hf", tmp_path / "hf", "--output", tmp_path / "saved", "--json")["notes"]

    if not is_configured:
        assert "names no token that ends documents: name it with --eod" in notes[-1]
        assert "give the token with --eod" in ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "x", code=65)
    else:
        assert notes[-1] == "documents end with <|stop|> (eos_token of tokenizer_config.json)"
    arguments = [] if is_configured else ["--eod", "<|stop|>"]
    ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "again", *arguments)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again").eos_token == "<|stop|>"


@pytest.mark.slow
def test_a_sentencepiece_tokenizer_is_exported_and_imported(ckpt: Ckpt, tmp_path: Path) -> None:
    model = tiny("llama", vocab_size=320)
    content = sentencepiece_model()
    state = trained_state(random_parameters(model))
    write_as_job(tmp_path / "saved", job_of(model), state, beside={"tokenizer.model": content})

    notes = ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "hf", "--json")["notes"]
    ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "hf", "--force")

    assert (tmp_path / "hf/tokenizer.model").read_bytes() == content
    assert any("with the sentencepiece library and tokenizer.model" in note for note in notes)

    found = ckpt("import-hf", tmp_path / "hf", "--output", tmp_path / "again", "--json")

    assert found["notes"][-1] == "documents end with </s> (eos_token of tokenizer_config.json)"
    assert tomllib.loads(found["toml"])["data"] == {"tokenizer": str(tmp_path / "hf/tokenizer.model")}
    assert (tmp_path / "again/tokenizer.model").read_bytes() == content
    ckpt("export-hf", tmp_path / "again", "--output", tmp_path / "twice")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "twice").eos_token == "</s>"
    ours = load_tokenizer(tmp_path / "hf/tokenizer.model")
    text = "  the caf\u00e9\n on \U0001f600 </s>"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == ours.encode(text)


def test_data_files_hold_some_parameters_each(ckpt: Ckpt, tmp_path: Path) -> None:
    model = tiny("llama")
    parameters = random_parameters(model)
    export(parameters, model, tmp_path / "hf")
    report = import_hf(tmp_path / "hf", LocalLocation(tmp_path / "saved"), file_bytes=10_000)

    files = [name for name in report.manifest.files if name.endswith(".distcp")]
    assert len(files) > 4
    assert "OK" in ckpt("verify", tmp_path / "saved")
    reader = ParameterReader(LocalLocation(tmp_path / "saved"), report.manifest)
    name = next(parameter for parameter in parameters if parameter.endswith("down.weight"))
    assert torch.equal(reader.read_parameter(name), parameters[name])


def test_a_model_of_no_family_is_refused(ckpt: Ckpt, tmp_path: Path) -> None:
    model = tiny("llama", block="parallel")
    write_as_job(tmp_path / "saved", job_of(model), trained_state(random_parameters(model)))
    message = ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "hf", code=78)
    assert 'model.block="parallel" cannot be exported' in message
    assert not (tmp_path / "hf").exists()


def test_sizes_have_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [size_in_bytes(text) for text in ("500MB", "2GiB", "12")] == [500_000_000, 2**31, 12]
    for text in ("0", "-1", "5 parsecs", "", "1.5GB"):
        assert main(["ckpt", "export-hf", str(tmp_path), "--output", "x", f"--max-shard-size={text}"]) == 2
        assert "is not a size like 500MB" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"{}", None])
def test_a_tokenizer_that_is_damaged_is_named(ckpt: Ckpt, tmp_path: Path, content: bytes | None) -> None:
    model = tiny("gpt2", vocab_size=300)
    beside = {"tokenizer.json": b'{"no": "tokenizer"}'}
    write_as_job(tmp_path / "saved", job_of(model), trained_state(random_parameters(model)), beside=beside)
    if content is not None:
        (tmp_path / "saved/tokenizer.json").write_bytes(content)
    message = ckpt("export-hf", tmp_path / "saved", "--output", tmp_path / "hf", code=65 if content is None else 66)
    problem = "is not a tokenizer.json" if content is None else "differs from its entry in the manifest"
    assert f"{tmp_path / 'saved/tokenizer.json'}: {problem}" in message
    assert not (tmp_path / "hf").exists()


def test_a_source_that_retention_removes_is_reported(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2")
    place = LocalLocation(tmp_path / "saved")
    export(random_parameters(model), model, tmp_path / "hf")
    ckpt("import-hf", tmp_path / "hf", "--output", place)
    read_range = LocalLocation.read_range

    def remove_and_read(self: LocalLocation, offset: int, num_bytes: int) -> bytes:
        place.remove()
        return read_range(self, offset, num_bytes)

    monkeypatch.setattr(LocalLocation, "read_range", remove_and_read)
    message = ckpt("export-hf", place, "--output", tmp_path / "again", code=66)
    assert "saved was removed while it was read" in message
    assert not (tmp_path / "again").exists()
