"""A user's program: `python -m tests.helpers.own_loss_program CONFIG --key=value` trains with its own loss."""

from __future__ import annotations

import sys

from torch import Tensor
from torch.nn import functional

import megatrain


def summed_loss(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the built-in loss, computed by torch."""
    return functional.cross_entropy(logits_TV, labels_T, ignore_index=-100, reduction="sum")


class PrintedSteps(megatrain.Callback):
    """Prints the rank and the step, on every rank."""

    def __init__(self) -> None:
        self._rank = -1

    def on_start(self, config: object, rank: int, step: int) -> None:
        self._rank = rank

    def on_step(self, report: megatrain.StepReport) -> None:
        print(f"rank {self._rank} has done step {report.step}", flush=True)


if __name__ == "__main__":
    megatrain.Trainer(sys.argv[1], sys.argv[2:], callbacks=[PrintedSteps()], loss=summed_loss).run_as_program()
