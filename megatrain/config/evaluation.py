"""Sections [validation_set] and [evaluation]: held-out data, when to measure the loss on them, and on how many.

There may be several validation sets: two tables [[validation_set]] are the sections [validation_set] and
[validation_set-2].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.config.data import NAME_PATTERN, NAMES_OF_PICTURES
from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSetConfig:
    """One of several sets of held-out data, whose loss is reported by its name.

    There may be up to 64: two tables `[[validation_set]]` are the same as `[validation_set]` and `[validation_set-2]`.
    Validation sets may be changed at any restart.
    """

    path: str = option(
        "",
        "Held-out tokens: the path or URL of a .bin and .idx pair without the suffix. With pictures from shards: "
        "the directory of the shards and their index. Empty: none.",
    )
    pictures: Literal["none", "drawn", "shards"] = option(
        "none",
        "The pictures of the samples of this set; the loss is that of their captions. drawn: 1024 pictures that no "
        "run trains on. shards: those of the path, which the producers of the training pictures decode. Training "
        "must have pictures of the same kind. none: text, also in a model with model.picture_size.",
    )
    name: str = option(
        "", 'Name of the set in logs and metrics. Empty: the path, or "drawn pictures".', pattern=NAME_PATTERN
    )

    @property
    def is_set(self) -> bool:
        """Whether the section names any data."""
        return bool(self.path) or self.has_pictures

    @property
    def has_pictures(self) -> bool:
        return self.pictures != "none"

    @property
    def resolved_name(self) -> str:
        return self.name or self.path or NAMES_OF_PICTURES[self.pictures]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """When to measure the loss on held-out data, and on how many samples."""

    interval: int = option(
        0, "Steps between evaluations. 0: only at the end, if held-out data are given.", unit="steps", minimum=0
    )
    num_samples: int = option(
        0, "Samples of each validation set to evaluate on. 0: the whole set.", unit="sequences", minimum=0
    )
    seq_len: int = option(
        0,
        "Tokens of a held-out sample, the same in all stages of the run; at most model.seq_len. 0: as many as a "
        "training sample has at the beginning of the run.",
        unit="tokens",
        minimum=0,
    )
