"""Learning rate as a pure function of the step: linear warm-up, then constant, linear, cosine or WSD.

Source: WSD (warm-up, stable, decay) as in MiniCPM (arXiv:2404.06395), with a linear decay.
"""

from __future__ import annotations

import math

from megatrain.config.optimizer import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, decay_steps: int) -> float:
    """Return the learning rate of step number `step`, counted from 0.

    decay_steps: the step, counted from the start of the warm-up, at which the rate has reached min_lr; it stays there.
    The first step has lr / lr_warmup_steps, because a step with a rate of 0 would be wasted.
    """
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    if config.lr_schedule == "wsd":
        decay_start, span = decay_steps - config.wsd_decay_steps, config.wsd_decay_steps
    else:
        decay_start, span = config.lr_warmup_steps, decay_steps - config.lr_warmup_steps
    progress = min(max((step - decay_start) / max(span, 1), 0.0), 1.0)
    if config.lr_schedule == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        remaining = 1.0 - progress
    return config.min_lr + (config.lr - config.min_lr) * remaining
