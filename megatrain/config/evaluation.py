"""Section [evaluation]: when to measure the loss on held-out tokens, and on how many."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.config.options import option


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
