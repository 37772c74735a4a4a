"""Section [checkpoint]: when to save and where to start from."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save and where to start from."""

    interval: int = field(
        default=0, metadata=option("Steps between checkpoints. 0: only at the end.", unit="steps", minimum=0)
    )
    save_at_end: bool = field(default=True, metadata=option("Whether the last step is saved."))
    resume: bool = field(
        default=True,
        metadata=option("Whether to go on from the newest checkpoint of the run directory when there is one."),
    )
    load: str = field(
        default="", metadata=option("Checkpoint directory to start from while this run has no checkpoint of its own.")
    )
