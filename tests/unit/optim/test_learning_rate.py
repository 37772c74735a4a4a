"""The learning rate as a function of the step: tables, torch's schedulers as oracles, and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from megatrain.config.optimizer import OptimizerConfig
from megatrain.optim import learning_rate


def rates(steps: list[int], decay_steps: int, **options: Any) -> list[float]:
    config = OptimizerConfig(**({"lr": 1.0} | options))
    return [learning_rate(config, step, decay_steps) for step in steps]


TABLE: list[tuple[dict[str, Any], list[int], list[float]]] = [
    ({"lr_schedule": "constant"}, [0, 1, 99, 100, 1000], [1, 1, 1, 1, 1]),
    ({"lr_schedule": "constant", "lr_warmup_steps": 1}, [0, 1], [1, 1]),
    ({"lr_schedule": "constant", "lr_warmup_steps": 4}, [0, 1, 2, 3, 4, 500], [0.25, 0.5, 0.75, 1, 1, 1]),
    ({"lr_schedule": "linear"}, [0, 25, 50, 99, 100, 101, 5000], [1, 0.75, 0.5, 0.01, 0, 0, 0]),
    ({"lr_schedule": "linear", "min_lr": 0.2}, [0, 50, 100, 101], [1, 0.6, 0.2, 0.2]),
    ({"lr_schedule": "linear", "lr_warmup_steps": 20}, [0, 9, 19, 20, 60, 100], [0.05, 0.5, 1, 1, 0.5, 0]),
    ({"lr_schedule": "cosine"}, [0, 50, 100, 300], [1, 0.5, 0, 0]),
    ({"lr_schedule": "cosine", "min_lr": 0.1}, [0, 50, 100, 300], [1, 0.55, 0.1, 0.1]),
    ({"lr_schedule": "cosine", "lr_warmup_steps": 20, "min_lr": 0.1}, [0, 19, 20, 60, 100], [0.05, 1, 1, 0.55, 0.1]),
    ({"lr_schedule": "cosine", "lr_warmup_steps": 20, "lr": 3e-4}, [10, 60], [1.65e-4, 1.5e-4]),
    ({"lr_schedule": "wsd", "wsd_decay_steps": 20}, [0, 50, 80, 90, 99, 100, 101], [1, 1, 1, 0.5, 0.05, 0, 0]),
    (
        {"lr_schedule": "wsd", "wsd_decay_steps": 20, "lr_warmup_steps": 10, "min_lr": 0.5},
        [0, 9, 10, 79, 80, 85, 100, 200],
        [0.1, 1, 1, 1, 1, 0.875, 0.5, 0.5],
    ),
    ({"lr_schedule": "wsd", "wsd_decay_steps": 90, "lr_warmup_steps": 10}, [9, 10, 55, 100], [1, 1, 0.5, 0]),
]


def test_rates_are_those_of_the_table() -> None:
    for options, steps, expected in TABLE:
        assert rates(steps, 100, **options) == pytest.approx(expected, abs=1e-12), options


@pytest.mark.parametrize(
    ("name", "steps", "make_scheduler"),
    [
        ("cosine", range(38), partial(CosineAnnealingLR, T_max=37, eta_min=0.07)),
        ("linear", range(50), partial(LinearLR, start_factor=1.0, end_factor=0.1, total_iters=37)),
    ],
)
def test_decay_is_torchs(name: str, steps: range, make_scheduler: Callable[..., LRScheduler]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.7)
    scheduler = make_scheduler(optimizer)
    for found in rates(list(steps), 37, lr=0.7, min_lr=0.07, lr_schedule=name):
        assert found == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 20),
    decay=st.integers(1, 30),
    stable=st.integers(0, 30),
    min_lr=st.floats(0, 1),
)
def test_rate_rises_to_lr_then_never_rises_and_ends_at_min_lr(
    schedule: str, warmup: int, decay: int, stable: int, min_lr: float
) -> None:
    decay_steps = warmup + stable + decay
    wsd_decay_steps = decay if schedule == "wsd" else 0
    found = rates(
        list(range(decay_steps + 10)),
        decay_steps,
        min_lr=min_lr,
        lr_schedule=schedule,
        lr_warmup_steps=warmup,
        wsd_decay_steps=wsd_decay_steps,
    )

    assert all(0 < rate <= 1 for rate in found[:warmup])
    assert found[:warmup] == sorted(found[:warmup])
    assert found[warmup] == pytest.approx(1.0)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(found[warmup:], found[warmup + 1 :], strict=False))
    assert all(rate >= min_lr - 1e-12 for rate in found[warmup:])
    assert all(math.isfinite(rate) for rate in found)
    if schedule != "constant":
        assert found[decay_steps:] == pytest.approx([min_lr] * 10)
