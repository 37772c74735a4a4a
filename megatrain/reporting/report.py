"""What is reported: a step, the steps between two lines, an evaluation. Plain values, the same for every sink.

The names of the fields are the names in metrics.jsonl, so they change only with FORMAT_VERSION.
Described for users in docs/guides/metrics.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

FORMAT_VERSION = 1

Value = int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step, as all ranks did it together. Made by the trainer."""

    kind: ClassVar[Literal["step"]] = "step"
    step: int
    """Number of finished steps, this one included."""
    loss: float
    """Nats per label token; not finite when that is why the step was skipped."""
    grad_norm: float
    """Before clipping."""
    lr: float
    duration_s: float
    """From asking for the data to the end of the update, the wait for the data included."""
    data_wait_s: float
    num_tokens: int
    """Of all ranks, in this step."""
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    is_skipped: bool
    num_skipped: int
    """Skipped steps so far."""
    memory_bytes: int
    """Most that the reporting rank ever held: of its GPU, on a CPU of the whole process."""
    world_size: int

    def values(self) -> dict[str, Value]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalReport:
    """The steps since the last step line: what that line says."""

    kind: ClassVar[Literal["interval"]] = "interval"
    step: int
    num_steps: int
    wall_s: float
    """Since the last line: steps, and whatever was between them."""
    loss: float
    """Mean over the tokens of the steps that were not skipped; NaN when all were."""
    grad_norm: float
    """Mean over the steps that were not skipped."""
    lr: float
    """Of the last step."""
    tokens_per_s: float
    """Tokens of all ranks over `wall_s`, so that evaluations, checkpoints and stalls count."""
    tokens_per_s_per_rank: float
    flops_per_s_per_rank: float
    mfu: float | None
    """As a fraction of 1; None when the device's peak is not known."""
    step_ms: float
    """Mean duration of a step; what is between steps does not count."""
    data_wait_ms: float
    memory_bytes: int
    num_skipped: int
    consumed_tokens: int

    def values(self) -> dict[str, Value]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The loss on held-out data after so many steps."""

    kind: ClassVar[Literal["evaluation"]] = "evaluation"
    step: int
    loss: float
    """Nats per token."""
    num_tokens: int
    bits_per_byte: float | None
    """None when the size of the text in bytes is not known."""
    duration_s: float

    def values(self) -> dict[str, Value]:
        return asdict(self)


Report = StepReport | IntervalReport | EvaluationReport
