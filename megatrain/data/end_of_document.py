"""Find the token that ends a document: from the files beside a tokenizer.json, else by its name in known models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from megatrain.checkpoint_format.checkpoint_names import TOKENIZER_CONFIG_NAME
from megatrain.contracts.errors import DataError
from megatrain.data.remote_path import DataPath

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|END_OF_TURN_TOKEN|>",
    "[EOS]",
)
"""The token's names in GPT-2, Llama 3, Llama 2, Gemma, DeepSeek, Command R and Kimi K2, in the order of search."""
GENERATION_CONFIG_NAME = "generation_config.json"

SmallFile = Callable[[str], bytes | None]
"""Returns the content of the file of this name beside the tokenizer; None if there is none."""


def files_beside(tokenizer: DataPath) -> SmallFile:
    """Return a reader of the files in a tokenizer's directory."""

    def content(name: str) -> bytes | None:
        path = tokenizer.parent / name
        try:
            return path.read_bytes() if path.exists() else None
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error

    return content


def no_files(name: str) -> None:
    """Return None: a SmallFile for a tokenizer without files beside it."""


def end_of_document(vocabulary: Mapping[str, int], beside: SmallFile) -> tuple[str, str]:
    """Return the token and the source that names it; both are empty if no source names one.

    The order: eos_token of tokenizer_config.json, eos_token_id of generation_config.json, the names of known models.
    """
    token = _eos_token(_object(beside(TOKENIZER_CONFIG_NAME)).get("eos_token"))
    if token in vocabulary:
        return token, f"eos_token of {TOKENIZER_CONFIG_NAME}"
    number = _object(beside(GENERATION_CONFIG_NAME)).get("eos_token_id")
    if isinstance(number, list) and number:
        number = number[0]
    named = next((text for text, token_id in vocabulary.items() if token_id == number and type(number) is int), "")
    if named:
        return named, f"eos_token_id of {GENERATION_CONFIG_NAME}"
    known = next((name for name in KNOWN_NAMES if name in vocabulary), "")
    return known, "a name that known models use" if known else ""


def tokenizer_config(end: str) -> str:
    """Return a tokenizer_config.json that names the end of a document."""
    return json.dumps({"eos_token": end}, indent=2) + "\n"


def _eos_token(value: Any) -> str:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _object(content: bytes | None) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file or no object in it."""
    try:
        found = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
