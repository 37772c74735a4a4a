"""Callbacks and custom losses: which losses are refused, and which forms of a configuration are accepted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatrain
from megatrain.config.serialize import to_toml
from megatrain.contracts.errors import ConfigError, UsageError
from megatrain.model.head import CrossEntropy, CustomLoss
from megatrain.ops.cross_entropy import summed_cross_entropy
from megatrain.training.extensions import Extensions, Loss
from tests.helpers.own_loss_program import summed_loss
from tests.helpers.single_rank_trainer import small_config

LOGITS_TV = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS_T = torch.tensor([0, 4, -100, 2, 1, 3])
VOCAB_SIZE = 5


def custom(loss: Loss) -> CustomLoss:
    return CustomLoss(loss, VOCAB_SIZE, CrossEntropy(VOCAB_SIZE))


def test_a_loss_and_its_gradient_are_the_functions() -> None:
    ours, theirs = (LOGITS_TV.clone().requires_grad_() for _ in range(2))
    found = custom(summed_loss)(ours * 1.0, LABELS_T)
    expected = summed_cross_entropy(theirs * 1.0, LABELS_T, VOCAB_SIZE)
    found.backward()
    expected.backward()

    assert torch.allclose(found, expected)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad)
    assert ours.grad[:, VOCAB_SIZE:].count_nonzero() == 0, "padding is not passed to the function"


def test_evaluation_has_cross_entropy() -> None:
    def refused(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        raise AssertionError

    found = custom(refused).eval()(LOGITS_TV.clone(), LABELS_T)
    assert torch.equal(found, summed_cross_entropy(LOGITS_TV.clone(), LABELS_T, VOCAB_SIZE))


def test_the_sum_has_the_dtype_of_accumulation() -> None:
    logits_TV = LOGITS_TV.bfloat16().requires_grad_()
    assert custom(lambda logits, labels: logits.sum())(logits_TV, LABELS_T).dtype == torch.float32


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda logits: 1.0, "returned a float; return the sum of the tokens' losses"),
        (lambda logits: logits[0], r"returned a tensor of shape \[5\]"),
        (lambda logits: logits.sum().detach(), "returned a tensor without a gradient"),
    ],
    ids=["float", "vector", "detached"],
)
def test_loss_that_is_not_a_sum_is_refused(returned: Any, message: str) -> None:
    loss = custom(lambda logits, labels: returned(logits))
    with pytest.raises(ConfigError, match=message):
        loss(LOGITS_TV.clone().requires_grad_(), LABELS_T)


def test_configuration_that_a_custom_loss_ignores_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path, {"train": {"z_loss": 0.1, "label_smoothing": 0.2}})
    found = Extensions(loss=summed_loss).problems(config)

    assert [problem.split(" ", 1)[0] for problem in found] == [
        "train.z_loss=0.1",
        "train.label_smoothing=0.2",
    ]
    assert Extensions().problems(config) == []
    with pytest.raises(ConfigError, match=r"train\.z_loss=0\.1 with a loss of your own"):
        megatrain.Trainer(config, loss=summed_loss).run()


def test_path_tables_and_configuration_mean_the_same(tmp_path: Path) -> None:
    config = small_config(tmp_path, {"job": {"run_directory": str(tmp_path / "run")}})
    file = tmp_path / "job.toml"
    file.write_text(to_toml(config))
    sources: list[Any] = [file, str(file), config, config.to_dict()]

    assert [megatrain.Trainer(source).config for source in sources] == [config] * 4
    changed = megatrain.Trainer(config.to_dict(), ["--train.steps=17"])
    assert (changed.config.train.steps, changed.run_directory) == (17, tmp_path / "run")


def test_all_problems_of_tables_are_reported_together() -> None:
    tables = {"model": {"hidden_size": "wide", "color": 1}, "train": {"steps": -1}, "modle": {}}
    with pytest.raises(ConfigError) as caught:
        _ = megatrain.Trainer(tables, ["--optimizer.lr=0"]).config
    for message in ('model.hidden_size="wide" must be an integer', "model.color=1 is not a known key", "[modle]",
                  "<= 2147483647 (given by the program)", "(--optimizer.lr on the command line)",
                  "model.vocab_size is missing and has no default; add vocab_size = N under [model]\n"):  # fmt: skip
        assert message in str(caught.value)


def test_another_thread_cannot_train(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def train() -> None:
        try:
            megatrain.Trainer(small_config(tmp_path)).run()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=train, name="a worker")
    thread.start()
    thread.join()
    (error,) = errors
    assert "in the thread 'a worker': it handles signals, which Python does in the main thread only" in str(error)
