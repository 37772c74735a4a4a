"""How the optimizer updates each parameter: by its name and kind, the same on every rank.

Pure functions: no I/O and no clock, and no import of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatrain.checkpoint_format.stored_tensors import EMA
from megatrain.config.optimizer import AS_OPTIMIZER, OptimizerConfig, ParameterGroupConfig, first_matching

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE_KINDS: Mapping[str, tuple[str, ...]] = {
    "adamw": _MOMENTS,
    "lamb": _MOMENTS,
    "muon": ("exp_avg",),
    "sgd": ("momentum",),
}


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The update of a parameter. The parameters of one bucket have the same rule.

    name: the name of the algorithm. lr_scale: the learning rate as a multiple of the optimizer's. weight_decay:
    decoupled, for matrices and embeddings; decays_all: whether norms and biases decay too. has_ema: whether a moving
    average of the weights is kept.
    """

    name: str = "adamw"
    weight_decay: float = 0.0
    lr_scale: float = 1.0
    decays_all: bool = False
    has_ema: bool = False

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The kinds of state besides the master weights. Each has one value per weight."""
        return (*_STATE_KINDS[self.name], *((EMA,) if self.has_ema else ()))


BY_ADAMW = UpdateRule()


def update_rule(
    config: OptimizerConfig, groups: Sequence[ParameterGroupConfig], name: str, *, is_hidden_weight: bool
) -> UpdateRule:
    """Return the rule of the parameter `name`. groups: the first one that matches the name applies.

    Muon is for the matrices between hidden states. With Muon, AdamW updates embeddings, head, positions, norms and
    biases.
    Source: Keller Jordan, Muon, 2024.
    """
    algorithm = "adamw" if config.name == "muon" and not is_hidden_weight else config.name
    rule = UpdateRule(algorithm, config.weight_decay, has_ema=config.ema_decay > 0.0)
    index = first_matching(name, groups)
    if index is None:
        return rule
    group = groups[index]
    if group.weight_decay == AS_OPTIMIZER:
        return replace(rule, lr_scale=group.lr_scale)
    return replace(rule, lr_scale=group.lr_scale, weight_decay=group.weight_decay, decays_all=True)
