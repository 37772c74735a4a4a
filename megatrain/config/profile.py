"""Section [profile]: which ranks and steps the torch profiler records."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Which ranks and steps the torch profiler records."""

    ranks: tuple[int, ...] = field(default=(), metadata=option("Ranks to record. Empty: no profile.", minimum=0))
    first_step: int = field(
        default=0, metadata=option("First step to record, counted from 0.", unit="steps", minimum=0)
    )
    num_steps: int = field(default=0, metadata=option("Steps to record. 0: no profile.", unit="steps", minimum=0))
