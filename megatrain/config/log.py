"""Section [log]: what is printed and where metrics go besides the run directory."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is printed and where metrics go besides the run directory."""

    interval: int = field(default=10, metadata=option("Steps between the log lines of steps.", unit="steps", minimum=1))
    has_tensorboard: bool = field(
        default=False, metadata=option("Whether metrics also go to TensorBoard files; needs the tensorboard package.")
    )
    has_wandb: bool = field(
        default=False, metadata=option("Whether metrics also go to Weights & Biases; needs the wandb package.")
    )
    wandb_project: str = field(default="megatrain", metadata=option("Project of the Weights & Biases run."))
