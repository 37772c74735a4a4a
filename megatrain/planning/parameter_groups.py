"""The parameters of the whole model by parameter group and update rule, as a plan counts them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatrain.config.config import Config
from megatrain.config.model_size import parameter_sizes
from megatrain.config.optimizer import first_matching
from megatrain.parallel.decoder import decoder_table
from megatrain.parallel.placement import row_of
from megatrain.parallel.update_rules import UpdateRule, update_rule


@dataclass(frozen=True, slots=True)
class GroupedParameters:
    """Parameters of one group with one update rule.

    pattern: the pattern of the group; empty for parameters in no group. num_tensors, num_parameters: in the whole
    model.
    """

    pattern: str
    rule: UpdateRule
    num_tensors: int
    num_parameters: int


def grouped_parameters(config: Config) -> tuple[GroupedParameters, ...]:
    """Return all parameters, in the order of the groups, those in no group last."""
    table, groups = decoder_table(config.model), config.parameter_groups
    tensors: Counter[tuple[int, UpdateRule]] = Counter()
    numels: Counter[tuple[int, UpdateRule]] = Counter()
    for name, numel in parameter_sizes(config.model).items():
        rule = update_rule(config.optimizer, groups, name, is_hidden_weight=row_of(name, table).is_hidden_weight)
        index = first_matching(name, groups)
        key = len(groups) if index is None else index, rule
        tensors[key] += 1
        numels[key] += numel
    patterns = [*(group.pattern for group in groups), ""]
    ordered = sorted(numels, key=lambda key: key[0])
    return tuple(GroupedParameters(patterns[key[0]], key[1], tensors[key], numels[key]) for key in ordered)
