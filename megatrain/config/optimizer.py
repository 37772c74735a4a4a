"""Section [optimizer]: the update rule and the learning-rate schedule. Section [parameter_group]: parameters with
their own learning rate or weight decay.

There may be several groups: two tables [[parameter_group]] are [parameter_group] and [parameter_group-2].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from megatrain.config.options import REQUIRED, option

AS_OPTIMIZER = -1.0
"""The value of a group's weight_decay that stands for optimizer.weight_decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The update rule and the learning-rate schedule."""

    name: Literal["adamw", "lamb", "muon", "sgd"] = option(
        "adamw",
        "Update rule. lamb scales each matrix's update by a trust ratio, so that batches can be 4 times as large. "
        "muon orthogonalizes the update of each matrix between hidden states and scales it to the size of an AdamW "
        "update. The other parameters use AdamW, with the same lr and weight_decay. sgd: gradients with momentum.",
    )
    lr: float = option(REQUIRED, "Highest learning rate, reached after warm-up.", above=0, maximum=1000)
    min_lr: float = option(0.0, "Learning rate at the end of the decay.", minimum=0, maximum=1000)
    beta1: float = option(0.9, "Decay of the first moment.", minimum=0, below=1)
    beta2: float = option(0.95, "Decay of the second moment.", minimum=0, below=1)
    eps: float = option(1e-8, "Added to the root of the second moment.", above=0)
    momentum: float = option(0.95, "muon and sgd: decay of the sum of gradients.", minimum=0, below=1)
    has_nesterov: bool = option(True, "muon and sgd: whether to use Nesterov momentum.")
    muon_precision: Literal["master", "bf16"] = option(
        "master",
        "muon: precision in which matrices are sent and orthogonalized: that of the master weights, or bf16, which "
        "is faster on GPUs and halves the communication.",
    )
    weight_decay: float = option(
        0.1, "Decoupled weight decay of matrices and embeddings; norms and biases have none.", minimum=0
    )
    ema_decay: float = option(
        0.0,
        "Keep an exponential moving average of the weights: after each update it is ema_decay * average + (1 - "
        "ema_decay) * weights. Checkpoints contain the average, and `--ema` of `megatrain sample` and `ckpt "
        "export-hf` reads it in place of the weights. 0: none.",
        minimum=0,
        below=1,
    )
    grad_clip: float = option(1.0, "Largest norm of the whole gradient. 0: no limit.", minimum=0)
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = option(
        "cosine",
        "What follows warm-up. constant: lr. linear and cosine: decay to min_lr. wsd (warmup, stable, decay): lr, "
        "then a decay over the last wsd_decay_steps.",
    )
    lr_warmup_steps: int = option(0, "Steps over which the rate rises to lr, in equal parts.", unit="steps", minimum=0)
    lr_decay_steps: int = option(
        0,
        "Number of the step, counted from 0, at which the rate has reached min_lr, where it stays. 0: train.steps. "
        "The last of D steps has number D - 1, so a run of exactly D steps ends one step before min_lr. It may be "
        "larger than train.steps if the run is the first part of a longer one.",
        unit="steps",
        minimum=0,
    )
    wsd_decay_steps: int = option(
        0, "Length of the decay that ends the wsd schedule, at lr_decay_steps.", unit="steps", minimum=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroupConfig:
    """Parameters with their own learning rate or weight decay. A parameter belongs to the first group that matches.

    There may be up to 16: two tables `[[parameter_group]]` are the same as `[parameter_group]` and
    `[parameter_group-2]`.
    """

    pattern: str = option(
        "",
        "Which parameters: their names, as `megatrain ckpt inspect --tensors` lists them after `model.`, with `*` "
        "for any characters, `?` for one, and `[...]` for one of several. Empty: none.",
    )
    lr_scale: float = option(1.0, "Their learning rate, as a multiple of optimizer.lr at each step.", minimum=0)
    weight_decay: float = option(
        AS_OPTIMIZER,
        "Their decoupled weight decay, which also applies to norms and biases. -1: optimizer.weight_decay, for "
        "matrices and embeddings only.",
        minimum=AS_OPTIMIZER,
    )


def first_matching(name: str, groups: Sequence[ParameterGroupConfig]) -> int | None:
    """Return the index of the group of a parameter, None if it is in no group."""
    return next((index for index, group in enumerate(groups) if fnmatchcase(name, group.pattern)), None)
