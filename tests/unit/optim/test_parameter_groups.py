"""Parameters with a separate learning rate or weight decay, for every update rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.config.optimizer import ParameterGroupConfig
from tests.helpers.example_optimizer import DECAYED, SHAPES, Rank, build_rank, draw, whole_state

LR, STEPS = 0.05, 3
GROUPS = (
    ParameterGroupConfig(pattern="*norm*", weight_decay=0.3),
    ParameterGroupConfig(pattern="*.up.*", lr_scale=0.25),
    ParameterGroupConfig(pattern="*.mlp.*", lr_scale=2.0, weight_decay=0.0),
)
"""The first match counts: the third has the down projection alone."""
OF_GROUPS = {
    "blocks.0.norm.weight": (1.0, 0.3),
    "blocks.0.norm.bias": (1.0, 0.3),
    "blocks.0.mlp.up.weight": (0.25, 0.1),
    "blocks.0.mlp.up.bias": (0.25, 0.0),
    "blocks.0.mlp.down.weight": (2.0, 0.0),
}
"""Name -> (scale of the learning rate, weight decay)."""


def after_steps(rank: Rank, scale: float = 1.0) -> dict[str, Tensor]:
    for step in range(STEPS):
        rank.set_gradients(draw(100 + step))
        rank.optimizer.step(LR * scale, 1.0)
    return whole_state([rank])


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_parameter_groups_equal_runs_with_their_rate_and_decay(name: str) -> None:
    found = after_steps(build_rank(name=name, weight_decay=0.1, groups=GROUPS))
    for parameter in SHAPES:
        scale, decay = OF_GROUPS.get(parameter, (1.0, 0.1 if parameter in DECAYED else 0.0))
        every = (ParameterGroupConfig(pattern="*", weight_decay=decay),)
        expected = after_steps(build_rank(name=name, groups=every), scale)

        torch.testing.assert_close(found[parameter], expected[parameter], rtol=1e-12, atol=1e-12, msg=parameter)


def test_lamb_keeps_its_trust_ratios_in_groups() -> None:
    """A norm that decays keeps a ratio of 1, and a matrix that does not decay has a separate ratio."""
    plain = after_steps(build_rank(name="lamb", weight_decay=0.1))
    groups = (ParameterGroupConfig(pattern="*", lr_scale=0.5),)
    halved = after_steps(build_rank(name="lamb", weight_decay=0.1, groups=groups), 2.0)
    for parameter in SHAPES:
        torch.testing.assert_close(halved[parameter], plain[parameter], rtol=1e-12, atol=1e-12, msg=parameter)

    decaying = (ParameterGroupConfig(pattern="*norm.weight", weight_decay=0.1),)
    lamb = after_steps(build_rank(name="lamb", weight_decay=0.0, groups=decaying))["blocks.0.norm.weight"]
    weight, direction = draw(0)["blocks.0.norm.weight"], None
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for number in range(1, STEPS + 1):
        gradient = draw(99 + number)["blocks.0.norm.weight"]
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        direction = (first / (1 - 0.9**number)) / ((second / (1 - 0.95**number)).sqrt() + 1e-8)
        weight = weight - LR * (direction + 0.1 * weight)
    torch.testing.assert_close(lamb, weight, rtol=1e-10, atol=1e-10)


def test_parameters_of_one_bucket_have_one_rule() -> None:
    rank = build_rank(groups=GROUPS, bucket_size=10**6)
    rules = [{parameter.rule for parameter in bucket.parameters} for bucket in rank.chunk.buckets]

    assert all(len(of_bucket) == 1 for of_bucket in rules)
    assert len(set().union(*rules)) == len(rules)
