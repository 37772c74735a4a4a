"""Sections [validation_set] and [evaluation]: held-out tokens, when to measure the loss on them, and on how many.

There may be several validation sets: two tables [[validation_set]] are the sections [validation_set] and
[validation_set-2].
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.config.data import NAME_PATTERN
from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSetConfig:
    """One of several sets of held-out tokens, whose loss is reported by its name.

    There may be up to 64: two tables `[[validation_set]]` are the same as `[validation_set]` and `[validation_set-2]`.
    Validation sets may be changed at any restart.
    """

    path: str = field(
        default="",
        metadata=option("Held-out tokens: the path or URL of a .bin and .idx pair without the suffix. Empty: none."),
    )
    name: str = field(
        default="",
        metadata=option("Name of the set in logs and metrics. Empty: the path.", pattern=NAME_PATTERN),
    )

    @property
    def is_set(self) -> bool:
        """Whether the section names any data."""
        return bool(self.path)

    @property
    def resolved_name(self) -> str:
        return self.name or self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """When to measure the loss on held-out tokens, and on how many."""

    interval: int = field(
        default=0,
        metadata=option(
            "Steps between evaluations. 0: only at the end, if held-out tokens are given.", unit="steps", minimum=0
        ),
    )
    num_samples: int = field(
        default=0,
        metadata=option(
            "Samples of each validation set to evaluate on. 0: the whole set.", unit="sequences", minimum=0
        ),
    )
    seq_len: int = field(
        default=0,
        metadata=option(
            "Tokens of a held-out sample, the same in all stages of the run; at most model.seq_len. 0: as many as a "
            "training sample has at the beginning of the run.",
            unit="tokens",
            minimum=0,
        ),
    )
