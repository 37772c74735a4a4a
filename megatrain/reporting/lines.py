"""Formats reports as lines of text; the progress line fits a given width. Pure functions: no I/O and no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.reporting.report import EvaluationReport, IntervalReport, ValidationSetReport

GIB = 1 << 30
_SHORTEST_BAR = 10
_LONGEST_BAR = 30


def step_line(report: IntervalReport, total_steps: int, device_word: str) -> str:
    """Return the line of an interval. `device_word` is "GPU" for ranks on GPUs and "rank" for ranks on CPUs."""
    utilization = [] if report.mfu is None else [f"MFU {report.mfu:.1%}"]
    return " | ".join(
        [
            f"step {report.step}/{total_steps}",
            f"loss {report.loss:.4f}",
            f"grad norm {report.grad_norm:.3f}",
            f"lr {report.lr:.2e}",
            f"{rate_text(report.tokens_per_s)} tokens/s",
            f"{rate_text(report.tokens_per_s_per_rank)} tokens/s/{device_word}",
            f"{report.flops_per_s_per_rank / 1e12:.3g} TFLOP/s/{device_word}",
            *utilization,
            f"{report.step_ms:,.1f} ms/step",
            f"data wait {report.data_wait_ms:,.1f} ms",
            f"mem {report.memory_bytes / GIB:.2f} GiB",
            f"skipped {report.num_skipped}",
            f"consumed {report.consumed_tokens:,} tokens",
        ]
    )


def evaluation_lines(report: EvaluationReport) -> list[str]:
    """Return the line of an evaluation; if there are several validation sets, also a line for each."""
    title, duration = f"evaluation at step {report.step}", f"{report.duration_s:.1f} s"
    if len(report.sets) < 2:
        return [" | ".join([title, *_loss_parts(report), duration])]
    return [
        " | ".join([f"{title}, {len(report.sets)} sets", *_loss_parts(report), duration]),
        *(" | ".join([f"{title}, {validation.name}", *_loss_parts(validation)]) for validation in report.sets),
    ]


def _loss_parts(report: EvaluationReport | ValidationSetReport) -> list[str]:
    # A perplexity beyond e**30 has no meaning, and a larger loss soon overflows exp.
    perplexity = [f"perplexity {math.exp(report.loss):,.2f}"] if report.loss < 30 else []
    bits = [] if report.bits_per_byte is None else [f"{report.bits_per_byte:.4f} bits/byte"]
    return [f"loss {report.loss:.4f}", *perplexity, *bits, f"{report.num_tokens:,} tokens"]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of the run, for the progress line."""

    step: int
    total_steps: int
    loss: float
    tokens_per_s: float
    remaining_s: float


def progress_line(progress: RunProgress, width: int) -> str:
    """Return the progress line in at most `width` characters: the last parts are dropped if they do not fit, and a bar
    fills free width."""
    parts = [
        f"step {progress.step}/{progress.total_steps}",
        f"ETA {duration_text(progress.remaining_s)}",
        f"loss {progress.loss:.4f}",
        f"{rate_text(progress.tokens_per_s)} tokens/s",
    ]
    while len(parts) > 1 and len(" | ".join(parts)) > width:
        parts.pop()
    free = width - len(" | ".join(parts)) - len(" []")
    if free >= _SHORTEST_BAR:
        length = min(free, _LONGEST_BAR)
        done = length * progress.step // progress.total_steps
        parts[0] += f" [{'#' * done}{'.' * (length - done)}]"
    return " | ".join(parts)[:width]


def rate_text(rate: float) -> str:
    """Return a rate with separated thousands; a rate below 100 has three significant digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def duration_text(seconds: float) -> str:
    """Return a duration in the form 0:07, 1:02:03 or 2d 01:02:03."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
