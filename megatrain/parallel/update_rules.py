"""How the optimizer updates each parameter: by its name and kind, the same on every rank. Pure, and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.config.optimizer import OptimizerConfig

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

    name: of the algorithm. weight_decay: decoupled, of matrices and embeddings.
    """

    name: str = "adamw"
    weight_decay: float = 0.0

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The kinds of state beside the master weights: of each, one value for each weight."""
        return _STATE_KINDS[self.name]


BY_ADAMW = UpdateRule()


def update_rule(config: OptimizerConfig, *, is_hidden_weight: bool) -> UpdateRule:
    """Return the rule of a parameter.

    Muon is for the matrices between hidden states. With it, embeddings, head, positions, norms and biases have AdamW.
    Source: Keller Jordan, Muon, 2024.
    """
    name = "adamw" if config.name == "muon" and not is_hidden_weight else config.name
    return UpdateRule(name, config.weight_decay)
