"""Small SentencePiece models, trained on a few sentences."""

from __future__ import annotations

import io
from typing import Any

from tests.helpers.require import require_module

SENTENCES = ["the cat sat on the mat", "a hat is not a cat", "that mat"] * 50


def sentencepiece_model(**options: Any) -> bytes:
    """Return a model of at most 300 pieces; by default a BPE with bytes for unknown characters."""
    sentencepiece = require_module("sentencepiece")
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=content,
        hard_vocab_limit=False,
        minloglevel=2,
        **({"vocab_size": 300, "model_type": "bpe", "byte_fallback": True} | options),
    )
    return content.getvalue()
