"""Text from a trained checkpoint: the function and the command sample the tokens that the model predicts.

The oracle is the model with the job's own final master weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.checkpoint.find import find_checkpoint
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import TOKENIZER_NAME
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.location import Location
from megatrain.cli import main
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, ConfigError, DataError
from megatrain.inference.generation import Sampling
from megatrain.inference.loaded_model import LoadedModel, load, load_checkpoint
from megatrain.model import TokenContext, Transformer
from tests.helpers.drawn_pictures import drawn, encoded
from tests.helpers.picture_shards import shard_tables, write_shards
from tests.helpers.rank_protocol import RankContext
from tests.helpers.require import require_module
from tests.helpers.tiny_data import write_corpus
from tests.helpers.training_case import CaseOrders, make_config, train_on_rank

require_module("tokenizers")

from megatrain.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer  # noqa: E402

CPU = torch.device("cpu")
VOCAB_SIZE = 260
SEQ_LEN = 16
PROMPT = "the hat"
GREEDY = Sampling(max_tokens=40, temperature=0.0)


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run directory with one checkpoint, and its model."""

    root: Path
    config: Config
    model: Transformer
    tokenizer: Tokenizer

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the most likely next tokens, each from the last SEQ_LEN tokens before it."""
        tokens = list(prompt)
        for _ in range(count):
            context = torch.tensor(tokens[-SEQ_LEN:])[:, None]
            place = TokenContext(torch.zeros(1, dtype=torch.int64), len(context))
            assert self.model.loss_head is not None
            with torch.no_grad():
                logits_SBV = self.model.loss_head.logits(self.model.hidden(context, place))
            tokens.append(int(logits_SBV[-1, 0, :VOCAB_SIZE].argmax()))
        return tokens[len(prompt) :]


def train(root: Path, tokenizer: Path | None) -> TrainedRun:
    data = write_corpus(root / "train", 2000, VOCAB_SIZE, seed=1)
    config = make_config(
        {"model": {"vocab_size": VOCAB_SIZE, "seq_len": SEQ_LEN, "hidden_size": 16, "num_layers": 1, "num_heads": 2}},
        # weights so large that the model does not repeat itself
        {"model": {"has_tied_head": False, "dropout": 0.3, "init_std": 0.5}, "optimizer": {"lr_warmup_steps": 0}},
        {"train": {"steps": 2, "precision": "fp32"}, "checkpoint": {"save_at_end": True}},
        {"data": {"train": str(data), "tokenizer": str(tokenizer or "")}},
        {"job": {"run_directory": str(root / "run")}},
    )
    record = train_on_rank(RankContext(0, 1, ""), config, CaseOrders())
    model = Transformer(config.model).eval()
    with torch.no_grad():
        for piece in record.final_state["master"]:
            # For a single rank, a piece is a run of whole rows; the offsets identify them.
            box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.values.shape, strict=True))
            model.get_parameter(piece.name)[box] = torch.from_numpy(piece.values)
    return TrainedRun(root / "run", config, model, load_tokenizer(tokenizer) if tokenizer else None)  # type: ignore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    root = tmp_path_factory.mktemp("sampled")
    tokenizer = root / "a-tokenizer.json"
    train_tokenizer(["the cat sat on the mat, the hat\n" * 30], VOCAB_SIZE).save(tokenizer)
    return train(root, tokenizer)


def checkpoint_of(run: TrainedRun) -> Location:
    return find_checkpoint(str(run.root))


@pytest.fixture
def loaded(run: TrainedRun) -> LoadedModel:
    return load_checkpoint(checkpoint_of(run), CPU)


@pytest.mark.slow
def test_greedy_tokens_are_the_likeliest_of_the_weights_saved(run: TrainedRun, loaded: LoadedModel) -> None:
    prompt = loaded.tokenizer.encode(PROMPT)
    found = list(loaded.tokens_after(prompt, GREEDY))

    expected = run.greedy(prompt, GREEDY.max_tokens)
    assert loaded.tokenizer.eod_id not in expected
    assert len(set(expected)) > 5, "a model that repeats itself would hide a token that was not appended"
    assert found == expected
    assert (loaded.step, loaded.config) == (2, run.config.model)
    assert not loaded.model.training


def test_a_prompt_that_is_empty_starts_a_document(run: TrainedRun, loaded: LoadedModel) -> None:
    found = list(loaded.tokens_after([], Sampling(max_tokens=5, temperature=0.0)))

    assert found == run.greedy([run.tokenizer.eod_id], 5)


def test_context_is_the_last_tokens_of_the_prompt(run: TrainedRun, loaded: LoadedModel) -> None:
    for prompt_length in (1, SEQ_LEN, SEQ_LEN + 5):
        prompt = [7 * place % VOCAB_SIZE for place in range(1, prompt_length + 1)]
        found = list(loaded.tokens_after(prompt, Sampling(max_tokens=3, temperature=0.0)))
        assert found == run.greedy(prompt, 3), prompt_length


def test_the_end_of_a_document_ends_the_text(loaded: LoadedModel) -> None:
    tokens = list(loaded.tokens_after([1], GREEDY))
    assert tokens.index(tokens[5]) == 5, "the final record arrives for the first time"
    ending: Any = SimpleNamespace(end="<end>", eod_id=tokens[5])

    assert list(replace(loaded, read_tokenizer=lambda: ending).tokens_after([1], GREEDY)) == tokens[:5]


def test_tokenizer_without_end_of_documents_samples_all_tokens(loaded: LoadedModel) -> None:
    endless: Any = SimpleNamespace(end="")
    tokens = list(loaded.tokens_after([1], GREEDY))
    assert list(replace(loaded, read_tokenizer=lambda: endless).tokens_after([1], GREEDY)) == tokens


def test_padding_rows_of_the_vocabulary_are_never_chosen(loaded: LoadedModel) -> None:
    head = loaded.model.loss_head
    assert head is not None
    assert head.weight.shape[0] == VOCAB_SIZE + 4
    with torch.no_grad():
        # One of the two is the most likely of all, for any hidden state.
        head.weight[VOCAB_SIZE] = 1e3 * torch.randn(head.weight.shape[1], generator=torch.Generator().manual_seed(0))
        head.weight[VOCAB_SIZE + 1] = -head.weight[VOCAB_SIZE]

    for sampling in (GREEDY, Sampling(max_tokens=20, temperature=1.0)):
        assert max(loaded.tokens_after([1], sampling)) < VOCAB_SIZE


def test_draws_are_those_of_the_seed(loaded: LoadedModel) -> None:
    first, again, other = (
        list(islice(loaded.tokens_after([1], Sampling(temperature=1.5, seed=seed)), 12)) for seed in (3, 3, 4)
    )

    assert first == again
    assert first != other


def test_the_command_takes_what_ckpt_takes(run: TrainedRun, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_of(run)
    for arguments in (
        [str(run.root / "checkpoints")],
        [str(checkpoint)],
        [f"file://{run.root}"],
        [f"file://{checkpoint}"],
        [str(run.root), "--step", "2", "--branch", "main"],
    ):
        assert main(["sample", *arguments, "--max-tokens", "1", "--device", "cpu", "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["step"] == 2
        assert found["checkpoint"].removeprefix("file://") == str(checkpoint)
    assert main(["sample", str(run.root), "--step", "1"]) == 66
    assert "no committed checkpoint of step 1 in its current ancestry (there are: main/2)" in capfd.readouterr().err


def saved_tokenizer(checkpoint: Location) -> Location:
    """Return the path of a checkpoint's tokenizer: under the name that its round gave it."""
    return checkpoint / read_manifest(checkpoint).name_of(TOKENIZER_NAME)


def test_checkpoint_without_a_tokenizer_gives_a_hint(run: TrainedRun, tmp_path: Path) -> None:
    bare = train(tmp_path, None)
    with pytest.raises(DataError, match=r"tokenizer\.json is missing: the job had no data\.tokenizer"):
        load_checkpoint(checkpoint_of(bare), CPU)
    loaded = load(bare.root, device="cpu", dtype="bf16")
    assert loaded.logits([1, 2]).shape == (2, VOCAB_SIZE)
    assert loaded.logits([1, 2]).dtype == torch.float32
    with pytest.raises(DataError, match=r"tokenizer\.json is missing"):
        loaded.generate("a")

    (checkpoint_of(bare) / TOKENIZER_NAME).write(saved_tokenizer(checkpoint_of(run)).read())
    assert load_checkpoint(checkpoint_of(bare), CPU).tokenizer.encode(PROMPT) == run.tokenizer.encode(PROMPT)


def test_a_tokenizer_that_is_not_the_one_saved_is_refused(run: TrainedRun, tmp_path: Path) -> None:
    place = LocalLocation(tmp_path / "copy")
    shutil.copytree(str(checkpoint_of(run)), place.path)
    saved = saved_tokenizer(place)
    saved.write(saved.read() + b"\n")
    message = r"copy/r000000-tokenizer\.json: differs from its entry in the manifest"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(place, CPU)


def test_the_command_prints_text_or_json(run: TrainedRun, capfd: pytest.CaptureFixture[str]) -> None:
    greedy = ["--prompt", PROMPT, "--temperature", "0", "--max-tokens", "6"]
    arguments = ["sample", str(run.root), "--device", "cpu", *greedy]
    prompt = run.tokenizer.encode(PROMPT)
    tokens = run.greedy(prompt, 6)

    assert main([*arguments, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["schema_version"], found["step"], found["prompt"]) == (1, 2, PROMPT)
    assert found["tokens"] == tokens
    assert found["text"] == run.tokenizer.decode(tokens)
    assert found["checkpoint"] == str(checkpoint_of(run))

    assert main(arguments) == 0
    printed = capfd.readouterr().out
    # Unprintable text may be written in another form.
    assert printed.startswith(PROMPT)
    assert printed.endswith("\n")


def test_the_function_writes_what_the_command_prints(run: TrainedRun, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["sample", str(run.root), "--prompt", PROMPT, "--device", "cpu", "--json"]
    assert main(command) == 0
    assert load(run.root, device="cpu").generate(PROMPT) == json.loads(capfd.readouterr().out)["text"]
    options = {"max_tokens": 5, "temperature": 1.2, "top_k": 50, "top_p": 0.9, "seed": 4}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert main([*command, *arguments]) == 0
    printed = json.loads(capfd.readouterr().out)

    for place in (run.root, Path(str(checkpoint_of(run)))):
        loaded = load(place, device="cpu")
        assert loaded.generate(PROMPT, **options) == printed["text"]
        assert (loaded.step, loaded.config) == (2, run.config.model)
    assert printed["text"]


def test_picture_for_a_model_without_is_refused(
    run: TrainedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.png"
    assert main(["sample", str(run.root), "--picture", str(picture), "--device", "cpu"]) == DataError.exit_code
    assert f"--picture {picture}: the model has no pictures" in capfd.readouterr().err


def test_picture_is_refused_by_the_limit_of_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tables = shard_tables(write_shards(tmp_path / "shards"))
    config = make_config(
        tables,
        {"pictures": {**tables["pictures"], "max_pixels": 2000}, "job": {"run_directory": str(tmp_path / "run")}},
        {"train": {"steps": 1}, "optimizer": {"lr_warmup_steps": 0}, "checkpoint": {"save_at_end": True}},
    )
    train_on_rank(RankContext(0, 1, ""), config, CaseOrders())
    arguments = ["sample", str(tmp_path / "run"), "--decoder", "pillow", "--device", "cpu", "--max-tokens", "1"]
    for name, size in (("fits.png", (40, 50)), ("large.png", (40, 51))):
        (tmp_path / name).write_bytes(encoded(drawn(*size), "PNG"))

    assert main([*arguments, "--picture", str(tmp_path / "fits.png")]) == 0
    assert main([*arguments, "--picture", str(tmp_path / "large.png")]) == DataError.exit_code
    assert "large.png: it has 40 x 51 pixels, and the limit is 2000" in capfd.readouterr().err


def test_logits_are_those_of_the_weights_saved(run: TrainedRun) -> None:
    loaded = load(run.root, step=2, device="cpu")
    tokens_BS = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN)
    assert run.model.loss_head is not None
    with torch.no_grad():
        hidden_SBH = run.model.hidden(tokens_BS.t(), TokenContext(torch.arange(2), SEQ_LEN))
        expected_BSV = run.model.loss_head.logits(hidden_SBH)[..., :VOCAB_SIZE].transpose(0, 1)

    assert torch.equal(loaded.logits(tokens_BS), expected_BSV)
    assert torch.equal(loaded.logits(tokens_BS.tolist()), expected_BSV)
    assert torch.allclose(loaded.logits(tokens_BS[1].tolist()), expected_BSV[1], rtol=1e-5, atol=1e-6)


def test_tokens_of_another_form_are_refused(loaded: LoadedModel) -> None:
    cases: list[tuple[Any, str]] = [
        ([VOCAB_SIZE], f"token {VOCAB_SIZE} is not in the vocabulary of this model .model.vocab_size={VOCAB_SIZE}"),
        ([3, -1], "token -1 is not in the vocabulary"),
        ([0] * (SEQ_LEN + 1), f"{SEQ_LEN + 1} tokens in a sequence, and model.seq_len={SEQ_LEN}; give at most"),
        ([0.5], r"tokens have shape \[1\] and type torch.float32; give integers"),
        ([], r"tokens have shape \[0\]"),
        (3, r"tokens have shape \[\]"),
        ([[1], [1, 2]], r"tokens cannot be made a tensor \(.*\); give integers of shape"),
    ]
    for tokens, message in cases:
        with pytest.raises(DataError, match=message):
            loaded.logits(tokens)


def test_function_names_a_wrong_place_or_value(run: TrainedRun, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"contains none; .*a Hugging Face directory would have a file config\.json"
    ):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="no committed checkpoint of step 1"):
        load(run.root, step=1)
    for options, message in (
        ({"dtype": "fp8"}, "dtype='fp8' is unknown; use one of fp32, bf16, fp64"),
        ({"device": "abacus"}, "device='abacus' is not a device that models run on"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(run.root, **options)
    with pytest.raises(ConfigError, match=r"max_tokens=-1 must be at least 0\n2. temperature=-1 .*\n3. top_p=0 "):
        load(run.root, device="cpu").generate(max_tokens=-1, temperature=-1.0, top_p=0.0)


def test_control_characters_of_a_model_are_escaped(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: "a\x1b[2J\tb\nc")
    assert main(["sample", str(run.root), "--prompt", ">", "--max-tokens", "1", "--device", "cpu"]) == 0
    assert capfd.readouterr().out == ">a\\x1b[2J\tb\nc\n"


def test_the_command_refuses_a_run_without_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(tmp_path)]) == 66
    assert "is not a checkpoint and contains none" in capfd.readouterr().err
