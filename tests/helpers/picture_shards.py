"""Shards of drawn shapes whose captions follow from the picture, their index, and a tokenizer of the captions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megatrain.data.drawn_pictures import WORDS, drawn, scene_of
from megatrain.data.pictures.picture_index import build_index
from megatrain.data.tokenizer import train_tokenizer
from tests.helpers.drawn_pictures import encoded, write_shard

TOKENIZER = "tokenizer.json"
VOCAB_SIZE = 264


def caption_of(number: int) -> str:
    """Return the caption of the picture with this number in the index, of one to three words."""
    words = [WORDS[token] for token in scene_of(5, number).caption[1:-1]]
    return " ".join(words[number % 3 :])


def picture_file(number: int) -> bytes:
    """Return the file of the picture with this number in the index."""
    return encoded(Image.fromarray(np.asarray(drawn(scene_of(5, number), 32 + number % 5))), "PNG")


def write_shards(
    directory: Path,
    num_shards: int = 2,
    pictures_of_shard: int = 8,
    bad: tuple[int, ...] = (),
    tails: Mapping[int, bytes] = {},
) -> Path:
    """Write shards, index and tokenizer to a new directory, and return it.

    bad: the pictures that are cut off. tails: bytes after the files of pictures, which decoders ignore.
    """
    directory.mkdir()
    for shard in range(num_shards):
        members: dict[str, bytes] = {}
        for number in range(shard * pictures_of_shard, (shard + 1) * pictures_of_shard):
            content = picture_file(number) + tails.get(number, b"")
            members[f"{number:04}.png"] = content[: len(content) // 2] if number in bad else content
            members[f"{number:04}.txt"] = caption_of(number).encode()
        write_shard(directory / f"shard-{shard}.tar", members)
    build_index(directory)
    train_tokenizer([" ".join(WORDS)] * 2, VOCAB_SIZE).save(directory / TOKENIZER)
    return directory


def shard_tables(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a tiny model with pictures from these shards, decoded by Pillow on this host."""
    return {
        "model": {
            "vocab_size": VOCAB_SIZE, "picture_size": 24, "patch_size": 12, "seq_len": 16, "encoder_hidden_size": 24,
            "encoder_num_layers": 1, "encoder_num_heads": 4,
        },
        "data": {"pictures": "shards", "tokenizer": str(directory / TOKENIZER)},
        "pictures": {"shards": str(directory), "decoder": "pillow"},
    }  # fmt: skip
