"""Section [parameter_group]: parameters with a learning rate or a weight decay of their own.

There may be several: [[parameter_group]] twice is [parameter_group] and [parameter_group-2].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megatrain.config.options import option

AS_OPTIMIZER = -1.0
"""The weight decay of a group that has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroupConfig:
    """Parameters with a learning rate or a weight decay of their own. The first group with a matching pattern counts.

    There may be up to 16: `[[parameter_group]]` twice is `[parameter_group]` and `[parameter_group-2]`, which may be
    written, too.
    """

    pattern: str = field(
        default="",
        metadata=option(
            "Which parameters: their names, as `megatrain ckpt inspect --tensors` lists them after `model.`, with `*` "
            "for any letters, `?` for one, and `[...]` for one of several. Empty: none."
        ),
    )
    lr_scale: float = field(
        default=1.0, metadata=option("Their learning rate, as a multiple of optimizer.lr at each step.", minimum=0)
    )
    weight_decay: float = field(
        default=AS_OPTIMIZER,
        metadata=option(
            "Their decoupled weight decay, also of norms and biases. -1: optimizer.weight_decay, of matrices and "
            "embeddings only.",
            minimum=AS_OPTIMIZER,
        ),
    )


def first_matching(name: str, groups: Sequence[ParameterGroupConfig]) -> int | None:
    """Return the index of the group of a parameter, None if it is in no group."""
    return next((index for index, group in enumerate(groups) if fnmatchcase(name, group.pattern)), None)
