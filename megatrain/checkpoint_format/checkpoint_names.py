"""The names of a checkpoint's directory and of the files in it."""

from __future__ import annotations

import hashlib
import re

METADATA_NAME = ".metadata"
"""The description of the tensors for torch's readers."""
INDEX_NAME = "index.json"
"""The description of the tensors for megatrain's readers: the same content, readable without torch."""
COMMIT_NAME = "COMMIT"
PINNED_NAME = "PINNED"
WRITING_NAME = "WRITING"
TOKENIZER_NAME = "tokenizer.json"
SENTENCEPIECE_NAME = "tokenizer.model"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
LATER_COMMIT_NAME = re.compile(rf"{COMMIT_NAME}-r[0-9]{{6,}}")
_MANIFEST_NAME = re.compile(r"r[0-9]{6,}-manifest-[0-9a-f]{8}\.json")
_ROUND = re.compile(r"r[0-9]{6,}-")
_DIRECTORY_NAME = re.compile(r"step-([0-9]{9,})")


def is_sentencepiece(name: str) -> bool:
    """Return whether the name of a tokenizer's file is that of a SentencePiece model, and not of a tokenizer.json."""
    return name.endswith(".model")


def step_directory_name(step: int) -> str:
    """Return "step-000000120" for step 120. Below 10^9 steps, names sort like steps."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint directory, or None for any other name."""
    match = _DIRECTORY_NAME.fullmatch(name)
    if match is None or step_directory_name(int(match[1])) != name:
        return None
    return int(match[1])


def manifest_name(content: bytes, round_number: int) -> str:
    """Return the file name of a manifest. No other content has this name."""
    return name_in_round(f"manifest-{hashlib.sha256(content).hexdigest()[:8]}.json", round_number)


def is_manifest_name(name: str) -> bool:
    """Return whether a file name is that of a manifest."""
    return _MANIFEST_NAME.fullmatch(name) is not None


def name_in_round(name: str, round_number: int) -> str:
    """Return a file's name in a round: "r000002-tokenizer.json". No other round writes to that name."""
    return f"r{round_number:06d}-{name.removeprefix('.')}"


def name_without_round(name: str) -> str:
    """Return "tokenizer.json" for the tokenizer's name in any round, and for its name in a conversion's output."""
    return _ROUND.sub("", name, count=1)
