"""All rules that classify the lines of a failure's log."""

from __future__ import annotations

from megatrain_job.failures.rule import Rule
from megatrain_job.failures.rules import (
    benign,
    collectives,
    context,
    cuda,
    data,
    families,
    gpu,
    host,
    network,
    numerics,
    scheduler,
    storage,
    trainer,
    user,
)

ALL_RULES: tuple[Rule, ...] = (
    *gpu.RULES,
    *cuda.RULES,
    *network.RULES,
    *collectives.RULES,
    *host.RULES,
    *storage.RULES,
    *data.RULES,
    *numerics.RULES,
    *scheduler.RULES,
    *user.RULES,
    *trainer.RULES,
    *families.RULES,
    *benign.RULES,
    *context.RULES,
)
