"""The tokenizer of a model directory: tokenizer.json as it is, and what transformers wants to know beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatrain.contracts.errors import CheckpointError
from megatrain.hf.config_json import parse_object

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>")
"""What Llama 3, Llama 2 and Gemma call the token before a text. Where there is none, a text begins after the end of
the one before, as in training."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The content of a tokenizer.json, its place for errors, and the id of its end-of-document token."""

    content: bytes
    place: str
    eod_id: int


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens around a text, by text and id."""

    eod: str
    eod_id: int
    beginning: str
    beginning_id: int

    @property
    def ids(self) -> dict[str, int]:
        """What config.json and generation_config.json say of them."""
        return {"bos_token_id": self.beginning_id, "eos_token_id": self.eod_id}

    def tokenizer_config(self, seq_len: int) -> dict[str, Any]:
        """Return tokenizer_config.json, with which transformers uses tokenizer.json unchanged."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.beginning,
            "eos_token": self.eod,
            "model_max_length": seq_len,
            "clean_up_tokenization_spaces": False,
        }


def special_tokens(tokenizer: TokenizerFile, vocab_size: int) -> SpecialTokens:
    """Return the special tokens of a tokenizer for a model of `vocab_size` tokens.

    Raises: CheckpointError when the file is no tokenizer.json, lacks the end-of-document token, or knows more tokens
    than the model.
    """
    ids = _token_ids(tokenizer)
    largest = max(ids.values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{tokenizer.place}: has token ids up to {largest}, but model.vocab_size={vocab_size}; give the tokenizer "
            f"that the model was trained with"
        )
    eod = next((text for text, token in ids.items() if token == tokenizer.eod_id), None)
    if eod is None:
        raise CheckpointError(
            f"{tokenizer.place}: has no token {tokenizer.eod_id}, which should end documents; give the tokenizer that "
            f"the model was trained with"
        )
    beginning = next((text for text in _BEGINNINGS if text in ids), eod)
    return SpecialTokens(eod, tokenizer.eod_id, beginning, ids[beginning])


def _token_ids(tokenizer: TokenizerFile) -> dict[str, int]:
    content = parse_object(tokenizer.content, tokenizer.place)
    vocabulary = content.section("model").values.get("vocab", {})
    added = content.values.get("added_tokens", [])
    try:
        if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of their ids
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        found = {**vocabulary, **{token["content"]: token["id"] for token in added}}
        return {str(text): int(number) for text, number in found.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{tokenizer.place}: not a tokenizer.json of the tokenizers library ({type(error).__name__}: {error}); "
            f"give another"
        ) from error
