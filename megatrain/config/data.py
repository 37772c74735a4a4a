"""Sections [data] and [evaluation]: which tokens to train and evaluate on, and when to evaluate on how many."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens to train and evaluate on."""

    train: str = field(
        default="", metadata=option("Training tokens: the path of a .bin and .idx pair without the suffix.")
    )
    validation: str = field(
        default="",
        metadata=option("Held-out tokens: the path of a .bin and .idx pair without the suffix. Empty: no evaluation."),
    )
    tokenizer: str = field(
        default="",
        metadata=option("Path of the tokenizer (tokenizer.json or NAME.model) that the tokens were made with."),
    )
    has_document_mask: bool = field(
        default=False,
        metadata=option("Whether attention stops at the boundaries of the documents packed in one sample."),
    )
    accepted_digest: str = field(
        default="",
        metadata=option(
            "Digest of training data with which a run may go on although its checkpoint was trained on other data of "
            "the same size. The refusal names it.",
            pattern="[0-9a-f]{32}|",
        ),
    )
    seed: int = field(default=0, metadata=option("Seed of the sample order. 0: train.seed.", minimum=0))
    prefetch: int = field(
        default=2,
        metadata=option(
            "Number of steps whose batches are read ahead. 0: each batch is read when it is needed.",
            unit="steps",
            minimum=0,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """When to measure the loss on held-out tokens, and on how many."""

    interval: int = field(
        default=0,
        metadata=option(
            "Steps between evaluations. 0: only at the end, when data.validation is set.", unit="steps", minimum=0
        ),
    )
    num_samples: int = field(
        default=0, metadata=option("Samples to evaluate on. 0: the whole set.", unit="sequences", minimum=0)
    )
