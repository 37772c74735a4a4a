"""The tokenizer of a model directory: its unchanged file, and the settings that transformers needs in addition.

The file is a tokenizer.json, or a SentencePiece model, which transformers reads with the sentencepiece library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.checkpoint_format.checkpoint_names import SENTENCEPIECE_NAME, TOKENIZER_NAME
from megatrain.contracts.errors import CheckpointError
from megatrain.hf.config_json import parse_object

_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>")
"""The token that begins a text in Llama 3, Llama 2 and Gemma.

A vocabulary without such a token uses the end-of-document token, because in training a text follows the end of another.
"""
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The content of a tokenizer's file, its location for error messages, and the id of its end-of-document token.

    `pieces`: the id of each piece of a SentencePiece model; None for a tokenizer.json.
    """

    content: bytes
    location: str
    eod_id: int
    pieces: Mapping[str, int] | None = None

    @property
    def file_name(self) -> str:
        return TOKENIZER_NAME if self.pieces is None else SENTENCEPIECE_NAME

    def ids(self) -> Mapping[str, int]:
        """Return the id of each token. Raises: CheckpointError when the file is not a tokenizer.json."""
        return token_ids(self.content, self.location) if self.pieces is None else self.pieces

    def export_notes(self) -> list[str]:
        """Return what transformers cannot do with the file, as one sentence each."""
        if self.pieces is None or not any(map(_BYTE_PIECE.fullmatch, self.pieces)):
            return []
        note = (
            "transformers decodes bytes, which stand for characters without a piece, as <0x0A> and the like; decode "
            f"with the sentencepiece library and {SENTENCEPIECE_NAME}"
        )
        return [note]


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that end and begin a text, each with its string and its id.

    is_sentencepiece: whether the tokenizer is a SentencePiece model.
    """

    eod: str
    eod_id: int
    beginning: str
    beginning_id: int
    is_sentencepiece: bool

    @property
    def ids(self) -> dict[str, int]:
        """The keys for config.json and generation_config.json."""
        return {"bos_token_id": self.beginning_id, "eos_token_id": self.eod_id}

    def tokenizer_config(self, seq_len: int) -> dict[str, Any]:
        """Return the content of tokenizer_config.json. It makes transformers use the tokenizer's file unchanged."""
        common = {
            "bos_token": self.beginning,
            "eos_token": self.eod,
            "model_max_length": seq_len,
            "clean_up_tokenization_spaces": False,
        }
        if not self.is_sentencepiece:
            return {"tokenizer_class": "PreTrainedTokenizerFast", **common}
        # as in training, the text of a control symbol is encoded as text, and no token is added
        return {
            "tokenizer_class": "SentencePieceBackend",
            "split_special_tokens": True,
            "special_tokens_pattern": "none",
            **common,
        }


def special_tokens(tokenizer: TokenizerFile, vocab_size: int) -> SpecialTokens:
    """Return the special tokens of a tokenizer for a model of `vocab_size` tokens.

    Raises: CheckpointError when the file is not a tokenizer.json, lacks the end-of-document token, or has more tokens
    than the model.
    """
    ids = tokenizer.ids()
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
    is_sentencepiece = tokenizer.pieces is not None
    return SpecialTokens(eod, tokenizer.eod_id, beginning, ids[beginning], is_sentencepiece)


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
