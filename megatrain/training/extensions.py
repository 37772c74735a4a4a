"""A user's additions to a training run: callbacks, and a loss that replaces cross entropy. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from megatrain.config.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.reporting.report import EvaluationReport, StepReport

Loss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""Returns the summed loss of a micro-batch, a scalar with a gradient, from its logits and labels.

Shapes: logits [T, V] with T = seq_len * micro_batch_size tokens and V = model.vocab_size; labels [T], int64, -100 where
a token has no label; without any label, the sum is 0. The trainer divides the sum by the number of labels in the global
batch. With tensor parallelism each rank of the group gets all columns of the logits and calls the function, which must
return the same on all of them.
"""


class Callback:
    """Receives the events of a run. A subclass overrides the methods that it needs.

    Every rank has its own callbacks and calls them in the thread of its step loop, in the order of the list.
    A loss is the same on all ranks; durations and memory are the rank's own. Training waits until a method returns. An
    exception ends the rank, and so the run.
    """

    def on_start(self, config: Config, rank: int, step: int) -> None:
        """Called once before the first step. step: the number of completed steps; 0 without a loaded checkpoint."""

    def on_step(self, report: StepReport) -> None:
        """Called after each step. The fields of `report` are those of metrics.jsonl: docs/guides/metrics.md."""

    def on_checkpoint(self, step: int) -> None:
        """Called when a snapshot of `step` was taken. It becomes a checkpoint in the background."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Called after each evaluation on held-out data."""

    def on_end(self, step: int, is_stopped: bool) -> None:
        """Called once after the last step, when the last checkpoint is stored; not after an error.

        is_stopped: a signal requested the end before train.steps.
        """


@dataclass(frozen=True, slots=True)
class Extensions:
    """The additions to a run. loss: None for cross entropy."""

    callbacks: tuple[Callback, ...] = ()
    loss: Loss | None = None

    def problems(self, config: Config) -> list[str]:
        """Return the settings of `config` that do not support a custom loss, one sentence each.

        Terms of the built-in loss would be ignored.
        """
        if self.loss is None:
            return []
        found = []
        for name in ("z_loss", "label_smoothing"):
            value = getattr(config.train, name)
            if value:
                found.append(
                    f"train.{name}={value:g} with a loss of your own: {name} is a term of the built-in loss; set "
                    f"train.{name}=0, and compute the term in your loss"
                )
        if config.kernels.cuda_graphs:
            found.append(
                "kernels.cuda_graphs=true with a loss of your own: a replayed graph does not call your loss; set "
                "kernels.cuda_graphs=false"
            )
        return found


NO_EXTENSIONS = Extensions()
