"""Sections [telemetry], [log] and [profile]: what a run records about itself, and where.

The black box of each rank and the peak for its utilization; what is printed and where metrics go; what the torch
profiler records.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.options import option
from megatrain.contracts.black_box.encoding import MAX_RECORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """The black box of each rank, and the peak that utilization is measured against."""

    black_box_directory: str = option(
        "/dev/shm",
        "Directory of the black boxes, which are in a subdirectory megatrain-UID that only this user can open. On "
        "a memory file system they use no disk and survive the process. Empty: off.",
    )
    black_box_records: int = option(
        65536,
        "Spans that a black box holds before it overwrites the oldest.",
        unit="records",
        minimum=256,
        maximum=MAX_RECORDS,
    )
    peak_tflops: float = option(
        0.0,
        "Peak of one device in the precision used, for MFU. 0: from the table of known GPUs; without one, MFU is "
        "not printed.",
        unit="TFLOP/s",
        minimum=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is printed and where metrics go besides the run directory."""

    interval: int = option(10, "Steps between log lines.", unit="steps", minimum=1)
    has_tensorboard: bool = option(
        False, "Whether metrics also go to TensorBoard files; needs the tensorboard package."
    )
    has_wandb: bool = option(False, "Whether metrics also go to Weights & Biases; needs the wandb package.")
    wandb_project: str = option("megatrain", "Project of the Weights & Biases run.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Which ranks and steps the torch profiler records."""

    ranks: tuple[int, ...] = option((), "Ranks to record. Empty: no profile.", minimum=0)
    first_step: int = option(0, "First step to record, counted from 0.", unit="steps", minimum=0)
    num_steps: int = option(0, "Steps to record. 0: no profile.", unit="steps", minimum=0)
