"""The reports on a step, on the steps between two step lines, and on an evaluation. All sinks get the same values.

The names of the fields are the names in metrics.jsonl, so they change only with FORMAT_VERSION.
docs/guides/metrics.md describes them for users.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

FORMAT_VERSION = 1

Value = int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """The training loss of the samples of one source of the data."""

    name: str
    loss: float
    """Nats per token, mean over the tokens of the source that have a label; NaN if there are none."""
    num_tokens: int
    """Number of the tokens of the source that have a label."""
    num_replaced: int = 0
    """Samples of the source that cannot be used and were replaced (data.bad_samples)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step of all ranks. Made by the trainer."""

    kind: ClassVar[Literal["step"]] = "step"
    step: int
    """Number of finished steps, including this one."""
    loss: float
    """Nats per label token; not finite if that is the reason why the step was skipped."""
    grad_norm: float
    """Before clipping."""
    lr: float
    duration_s: float
    """From the request for the data to the end of the update, including the wait for the data."""
    data_wait_s: float
    num_tokens: int
    """Tokens of all ranks in this step."""
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    is_skipped: bool
    num_skipped: int
    """Skipped steps so far."""
    memory_bytes: int
    """Peak memory of the reporting rank: of its GPU, or of its process if it trains on a CPU."""
    world_size: int
    num_replaced: int = 0
    """Samples of this step that cannot be used and were replaced (data.bad_samples)."""
    num_pictures: int = 0
    """Samples of this step that have a picture."""
    sources: tuple[SourceReport, ...] = ()
    """The sources with tokens or replaced samples in this step, in the order of the mixture; none for a run with one
    source."""

    @property
    def seq_len(self) -> int:
        """The tokens of a sample."""
        return self.num_tokens // self.global_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalReport:
    """The steps since the last step line, summarized for the next step line."""

    kind: ClassVar[Literal["interval"]] = "interval"
    step: int
    num_steps: int
    wall_s: float
    """Time since the last line, including everything between the steps."""
    loss: float
    """Mean over the tokens of the steps that were not skipped; NaN if all steps were skipped."""
    grad_norm: float
    """Mean over the steps that were not skipped."""
    lr: float
    """The learning rate of the last step."""
    tokens_per_s: float
    """Tokens of all ranks over `wall_s`, so that evaluations, checkpoints and stalls count."""
    tokens_per_s_per_rank: float
    flops_per_s_per_rank: float
    mfu: float | None
    """As a fraction of 1; None if the device's peak is not known."""
    step_ms: float
    """Mean duration of a step; the time between steps does not count."""
    data_wait_ms: float
    memory_bytes: int
    num_skipped: int
    consumed_tokens: int
    num_replaced: int = 0
    """Sum over the steps that were not skipped."""
    sources: tuple[SourceReport, ...] = ()
    """The means over the tokens of the steps that were not skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSetReport:
    """The loss on one of the sets of an evaluation. The fields are as in EvaluationReport."""

    name: str
    loss: float
    num_tokens: int
    bits_per_byte: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The loss on held-out data after `step` steps: of all validation sets together, and of each."""

    kind: ClassVar[Literal["evaluation"]] = "evaluation"
    step: int
    loss: float
    """Nats per token, mean over the tokens of all sets."""
    num_tokens: int
    bits_per_byte: float | None
    """None if the size of the text in bytes is not known."""
    duration_s: float
    sets: tuple[ValidationSetReport, ...]


Report = StepReport | IntervalReport | EvaluationReport


def curves(report: Report) -> dict[str, Value]:
    """Return a report's numbers as kind/field; those of a source or validation set as kind/name/field."""
    tables = {report.kind: asdict(report), **{f"{report.kind}/{part.name}": asdict(part) for part in _parts(report)}}
    return {
        f"{prefix}/{name}": value
        for prefix, values in tables.items()
        for name, value in values.items()
        if name not in ("step", "sets", "sources", "name")
    }


def _parts(report: Report) -> tuple[ValidationSetReport, ...] | tuple[SourceReport, ...]:
    return report.sets if isinstance(report, EvaluationReport) else report.sources
