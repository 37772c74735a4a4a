"""Section [train]: how long to train and in which precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.config.options import REQUIRED, option


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long to train and in which precision."""

    steps: int = option(REQUIRED, "Optimizer steps of the whole run, from the first.", unit="steps", minimum=1)
    precision: Literal["fp32", "bf16", "fp64"] = option(
        "bf16",
        "Type of weights and activations. bf16 keeps fp32 master weights and accumulates gradients in fp32. fp64 "
        "is for parity tests.",
    )
    seed: int = option(
        1234, "Seed of the initial weights, of dropout and, unless data.seed is set, of the data.", minimum=0
    )
    z_loss: float = option(
        0.0,
        "Weight of z-loss: z_loss times the square of the log-sum-exp of a token's logits is added to its loss, "
        "which keeps logits from drifting (1e-4 is usual). The reported training loss includes it, the evaluation "
        "loss does not. 0: none.",
        minimum=0,
    )
    label_smoothing: float = option(
        0.0,
        "Share of each label that is spread evenly over the vocabulary. The reported training loss includes it, "
        "the evaluation loss does not. 0: none.",
        minimum=0,
        below=1,
    )
    max_skipped_steps: int = option(
        10,
        "The run stops when this many steps in a row had a loss or gradient that is not finite. Until then such a "
        "step is skipped: its batch counts as consumed and the learning rate schedule advances.",
        unit="steps",
        minimum=1,
    )
    gc_interval: int = option(
        100,
        "Steps between planned garbage collections, on all ranks at once. 0: whenever Python decides.",
        unit="steps",
        minimum=0,
    )
    checksum_interval: int = option(
        0,
        "Steps between comparisons of all parameters over their replicas (data-parallel ranks), by checksums. A "
        "difference ends the run with an error that names the parameter and the rank. Each comparison reads all "
        "parameters once. 0: never.",
        unit="steps",
        minimum=0,
    )
