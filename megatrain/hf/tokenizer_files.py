"""The tokenizer of a model directory: tokenizer.json unchanged, and the settings that transformers needs besides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatrain.contracts.errors import CheckpointError
from megatrain.hf.config_json import parse_object

_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>")
"""The token that begins a text in Llama 3, Llama 2 and Gemma.

A vocabulary without such a token uses the end-of-document token: as in training, a text follows the end of another.
"""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The content of a tokenizer.json, its location for error messages, and the id of its end-of-document token."""

    content: bytes
    location: str
    eod_id: int


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that end and begin a text, each with its string and its id."""

    eod: str
    eod_id: int
    beginning: str
    beginning_id: int

    @property
    def ids(self) -> dict[str, int]:
        """The keys for config.json and generation_config.json."""
        return {"bos_token_id": self.beginning_id, "eos_token_id": self.eod_id}

    def tokenizer_config(self, seq_len: int) -> dict[str, Any]:
        """Return the content of tokenizer_config.json. It makes transformers use tokenizer.json unchanged."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.beginning,
            "eos_token": self.eod,
            "model_max_length": seq_len,
            "clean_up_tokenization_spaces": False,
        }


def special_tokens(tokenizer: TokenizerFile, vocab_size: int) -> SpecialTokens:
    """Return the special tokens of a tokenizer for a model of `vocab_size` tokens.

    Raises: CheckpointError when the file is not a tokenizer.json, lacks the end-of-document token, or has more tokens
    than the model.
    """
    ids = token_ids(tokenizer.content, tokenizer.location)
    largest = max(ids.values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{tokenizer.location}: has token ids up to {largest}, but model.vocab_size={vocab_size}; give the "
            "tokenizer that the model was trained with"
        )
    eod = next((text for text, token in ids.items() if token == tokenizer.eod_id), None)
    if eod is None:
        raise CheckpointError(
            f"{tokenizer.location}: has no token {tokenizer.eod_id}, which should end documents; give the "
            "tokenizer that the model was trained with"
        )
    beginning = next((text for text in _BEGINNINGS if text in ids), eod)
    return SpecialTokens(eod, tokenizer.eod_id, beginning, ids[beginning])


def token_ids(tokenizer: bytes, location: str) -> dict[str, int]:
    """Return the id of each token of a tokenizer.json; `location` names it in errors.

    Raises: CheckpointError when it is not a tokenizer.json.
    """
    content = parse_object(tokenizer, location)
    vocabulary = content.section("model").values.get("vocab", {})
    added = content.values.get("added_tokens", [])
    try:
        if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of their ids
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        found = {**vocabulary, **{token["content"]: token["id"] for token in added}}
        return {str(text): int(number) for text, number in found.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{location}: not a tokenizer.json of the tokenizers library ({type(error).__name__}: {error}); "
            f"give another"
        ) from error
