"""Answers about pictures: logits of a loaded model with patches, and how the demo counts what is right."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.config.model import ModelConfig
from megatrain.contracts.errors import DataError
from megatrain.data.drawn_pictures import DrawnPictures
from megatrain.data.pictures.picture_format import PictureFormat
from megatrain.demo_vision import Answers, answers_of, captions_of
from megatrain.inference.generation import Sampling
from megatrain.inference.loaded_model import LoadedModel
from megatrain.model import PatchRows, TokenContext, Transformer

MODEL = ModelConfig(
    vocab_size=12,
    vocab_multiple=4,
    seq_len=20,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    picture_size=24,
    patch_size=6,
)
NUMBERS = np.array([3, 700])


def no_tokenizer() -> NoReturn:
    raise AssertionError("no tokenizer is needed")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    torch.manual_seed(2)
    model = Transformer(MODEL).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return LoadedModel(model, MODEL, 0, torch.device("cpu"), no_tokenizer)


def plain_logits(loaded: LoadedModel, tokens: list[int], patches_PC: Tensor) -> Tensor:
    """Return the logits [S, V] of one sample, by the model's own call."""
    context = TokenContext(
        torch.zeros(1, dtype=torch.int64), len(tokens), pictures=PatchRows.of_all(patches_PC[:, None])
    )
    with torch.no_grad():
        hidden = loaded.model.hidden(torch.tensor(tokens)[:, None], context)
        assert loaded.model.loss_head is not None
        return loaded.model.loss_head.logits(hidden)[:, 0, : MODEL.vocab_size]


def patches_of_numbers() -> Tensor:
    return torch.from_numpy(DrawnPictures(PictureFormat(MODEL.picture_size, MODEL.patch_size), 0).patches(NUMBERS))


def test_logits_of_several_pictures_are_those_of_each(loaded: LoadedModel) -> None:
    patches, tokens = patches_of_numbers(), [[0] * 16 + [0, 2], [7] * 16 + [0, 4]]
    found = loaded.logits(tokens, patches)

    for sample, expected in enumerate(plain_logits(loaded, *pair) for pair in zip(tokens, patches, strict=True)):
        torch.testing.assert_close(found[sample], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(loaded.logits(tokens[sample], patches[sample]), expected, rtol=1e-12, atol=1e-12)


def test_text_without_a_picture_is_that_of_a_decoder_alone(loaded: LoadedModel) -> None:
    decoder = Transformer(replace(MODEL, picture_size=0)).double().eval()
    decoder.load_state_dict(loaded.model.state_dict(), strict=False)
    alone = LoadedModel(decoder, decoder.config, 0, torch.device("cpu"), no_tokenizer)
    tokens = [3, 5, 7]

    torch.testing.assert_close(loaded.logits(tokens), alone.logits(tokens), rtol=1e-12, atol=1e-12)


def test_tokens_follow_the_picture_and_the_last_tokens(loaded: LoadedModel) -> None:
    """The picture stays in the context, which has room for 4 tokens beside it. The text starts a document."""
    speaking = replace(loaded, read_tokenizer=lambda: SimpleNamespace(end="", eod_id=0))  # type: ignore[arg-type, return-value]
    patches, rows = patches_of_numbers()[0], [0] * MODEL.num_patches
    expected = [0, 1, 2]
    for _ in range(6):
        expected.append(int(plain_logits(loaded, rows + expected[-4:], patches)[-1].argmax()))

    greedy = Sampling(max_tokens=6, temperature=0.0)
    assert list(speaking.tokens_after([1, 2], greedy, patches)) == expected[3:]
    assert list(speaking.tokens_after([1, 2], greedy)) != expected[3:]
    with pytest.raises(DataError, match=r"the patches are \[3, 108\] of torch\.uint8"):
        list(speaking.tokens_after([1, 2], greedy, patches[:3]))


def test_captions_are_the_likeliest_words(loaded: LoadedModel) -> None:
    found = captions_of(loaded, NUMBERS)

    for words, patches in zip(found.tolist(), patches_of_numbers(), strict=True):
        tokens = [0] * 17
        for _ in range(3):
            tokens.append(int(plain_logits(loaded, tokens, patches)[-1].argmax()))
        assert words == tokens[17:]


@pytest.mark.parametrize(
    ("tokens", "patches", "message"),
    [
        (
            [0] * 17,
            torch.zeros(16, 108),
            "the patches are [16, 108] of torch.float32; give patches of shape [16, 108] and type uint8",
        ),
        ([[0] * 17], torch.zeros(16, 108, dtype=torch.uint8), "give patches of shape [1, 16, 108]"),
        ([0] * 16, torch.zeros(16, 108, dtype=torch.uint8), "16 tokens in a sequence whose first 16 rows are patches"),
    ],
)  # fmt: skip
def test_patches_of_another_form_are_refused(
    loaded: LoadedModel, tokens: list[int], patches: Tensor, message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        loaded.logits(tokens, patches)


def test_answers_are_compared_with_chance_for_each_question() -> None:
    found = answers_of(np.array([[1, 5, 9], [2, 5, 9]]), np.array([[1, 5, 10], [1, 5, 9]]))

    assert found == Answers(
        {"number": 0.5, "color": 1.0, "shape": 0.5}, {"number": 1 / 4, "color": 1 / 4, "shape": 1 / 3}
    )
    assert found.least_margin == pytest.approx(0.5 - 1 / 3)
